"""Wrapped, sharded and unusual models cost what the bare ones do, and are left as they were."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn

transformers = pytest.importorskip("transformers")

from coati_perf.flops import CostModel  # noqa: E402
from flops_accuracy import half_frozen, with_lora  # noqa: E402
from tiny_models import configs  # noqa: E402

CONFIG = configs()["Llama (GQA)"]


def llama() -> nn.Module:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(CONFIG)


def same(cost, other) -> bool:
    return (cost.trace, cost.executed_learning) == (other.trace, other.executed_learning)


@pytest.fixture
def process_group():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    store = dist.TCPStore("127.0.0.1", port, 1, is_master=True)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_module_costs_what_its_config_does():
    assert same(CostModel.traced(llama()), CostModel.traced(CONFIG))


def test_ddp_is_taken_off(process_group):
    bare = CostModel.traced(CONFIG)
    wrapped = nn.parallel.DistributedDataParallel(half_frozen(llama()))
    assert same(CostModel.traced(wrapped), CostModel.traced(half_frozen(llama())))
    assert not same(CostModel.traced(wrapped), bare)


def test_a_compiled_model_is_traced_as_it_was():
    assert same(CostModel.traced(torch.compile(llama())), CostModel.traced(CONFIG))


def test_fsdp_is_taken_off_and_frozen_weights_stay_frozen(process_group):
    from torch.distributed.fsdp import fully_shard

    model = half_frozen(llama())
    expected = CostModel.traced(model)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    assert same(CostModel.traced(model), expected)


def test_fsdps_first_version_is_taken_off(process_group):
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    model = half_frozen(llama())
    expected = CostModel.traced(model)
    wrapped = FullyShardedDataParallel(
        model,
        use_orig_params=True,
        device_id=torch.device("cpu"),
        sharding_strategy=ShardingStrategy.NO_SHARD,
    )
    assert same(CostModel.traced(wrapped), expected)


def test_a_sharded_module_without_a_config_is_refused(process_group):
    from torch.distributed.fsdp import fully_shard

    module = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8))
    fully_shard(module)
    with pytest.raises(ValueError, match="Make the cost model before you wrap the model in FSDP"):
        CostModel.traced(module)


def test_a_live_model_and_the_process_are_left_as_they_were():
    model = with_lora(llama())
    model.train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random_state, grad_mode = torch.get_rng_state(), torch.is_grad_enabled()
    CostModel.traced(model, gradient_checkpointing=True)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.training
    assert not model.is_activation_checkpointing
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(torch.get_rng_state(), random_state)
    assert torch.is_grad_enabled() == grad_mode
    assert model(torch.tensor([[5, 6]])).logits.shape == (1, 2, 131)


def test_tracing_works_where_gradients_are_off():
    expected = CostModel.traced(CONFIG, attention="full")
    os.environ["COATI_PERF_CACHE"] += "-other"  # or the cache would answer
    with torch.inference_mode():
        assert same(CostModel.traced(CONFIG, attention="full"), expected)


def test_checkpointing_costs_nothing_useful():
    plain = CostModel.traced(CONFIG)
    checkpointed = CostModel.traced(CONFIG, gradient_checkpointing=True)
    assert checkpointed.forward_backward(100) == plain.forward_backward(100)
    assert checkpointed.forward_backward(100, executed=True) > plain.forward_backward(100)


class Critic(nn.Module):
    """A value head as ColossalChat makes one: a bare model and a linear layer on its states."""

    def __init__(self):
        super().__init__()
        self.model = transformers.AutoModel.from_config(CONFIG)
        self.value_head = nn.Linear(64, 1)

    def forward(self, input_ids, attention_mask=None):
        states = self.model(input_ids, attention_mask=attention_mask)["last_hidden_state"]
        return self.value_head(states)[:, :-1].squeeze(-1)


def test_a_value_head_takes_the_place_of_the_vocabulary():
    """2 · 64 FLOP a token in the place of 2 · 64 · 131, and so in learning thrice."""
    critic, actor = CostModel.traced(Critic()), CostModel.traced(CONFIG)
    assert actor.forward(100) - critic.forward(100) == 100 * 2 * 64 * (131 - 1)
    assert actor.forward_backward(100) - critic.forward_backward(100) == 100 * 6 * 64 * (131 - 1)


def test_a_reward_model_scores_with_one_output():
    config = transformers.LlamaConfig(**{**CONFIG.to_dict(), "num_labels": 1})
    reward = transformers.AutoModelForSequenceClassification.from_config(config)
    difference = CostModel.traced(CONFIG).forward(100) - CostModel.traced(reward).forward(100)
    assert difference == 100 * 2 * 64 * (131 - 1)


def test_a_frozen_model_learns_at_the_cost_of_a_forward():
    frozen = llama().requires_grad_(requires_grad=False)
    cost = CostModel.traced(frozen)
    assert cost.forward_backward(100) == cost.forward(100)


def test_logits_of_the_last_token_alone_make_prefill_cheaper():
    cost = CostModel.traced(CONFIG)
    assert cost.forward(100) - cost.prefill(100) == 99 * 2 * 64 * 131


@pytest.mark.parametrize("experts", ["eager", "batched_mm", "grouped_mm"])
def test_experts_cost_the_same_however_they_are_run(experts):
    config = configs()["Mixtral (MoE)"]
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation=experts)
    assert same(CostModel.traced(model), CostModel.traced(config))


def test_the_key_value_cache_and_weights_of_a_grouped_query_model():
    """4 layers, 2 key-value heads of 20; weights are all parameters but the input embedding."""
    memory = CostModel.traced(CONFIG).memory
    assert memory.cache == ((memory.cache[0][0], 4 * 2 * 2 * 20),)
    parameters = sum(parameter.numel() for parameter in llama().parameters())
    assert memory.weights == parameters - 131 * 64
    assert memory.trained == parameters
    tied = CostModel.traced(configs()["Llama (MQA, tied)"]).memory
    assert tied.weights == tied.trained


def test_a_step_over_few_tokens_reads_few_experts():
    memory = CostModel.traced(configs()["Mixtral (MoE)"]).memory
    (experts,) = memory.experts
    assert (experts.number, experts.active) == (4, 2)
    assert experts.elements == 4 * 4 * 3 * 64 * 96
    assert memory.forward(torch.tensor([1.0])) == 2 * (memory.weights + experts.elements / 2)
    # a token misses an expert with 1/2: two tokens with 1/4
    assert memory.forward(torch.tensor([2.0])) == 2 * (memory.weights + experts.elements * 3 / 4)


def test_a_ragged_batch_is_decoded_until_its_last_sequence_is_done():
    memory = CostModel.traced(configs()["Mixtral (MoE)"]).memory
    (experts,) = memory.experts
    per_position = memory.cache[0][1]
    moved = memory.decode(torch.tensor([5.0, 9.0]), torch.tensor([3.0, 1.0]))
    both = memory.weights + experts.elements * 3 / 4
    alone = memory.weights + experts.elements / 2
    keys = (6 + 7 + 8) + 10
    assert moved == 2 * (both + 2 * alone + per_position * (keys + 4))


RANK = """
import sys, time
from pathlib import Path
import coati_perf.flops.traced as module
from coati_perf.flops import CostModel
from transformers import LlamaConfig

folder = Path(sys.argv[1])
real = module._trace_on

def counting(*arguments, **options):
    (folder / f"traced-{sys.argv[2]}").touch()
    return real(*arguments, **options)

module._trace_on = counting
(folder / f"ready-{sys.argv[2]}").touch()
while len(list(folder.glob("ready-*"))) < 4:
    time.sleep(0.001)
config = LlamaConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=2, vocab_size=50)
print(CostModel.traced(config).forward(100))
"""


def test_ranks_that_start_together_trace_once(tmp_path):
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(tmp_path), str(rank)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(4)
    ]
    answers = {rank.communicate(timeout=120)[0] for rank in ranks}
    assert [rank.returncode for rank in ranks] == [0, 0, 0, 0]
    assert len(answers) == 1
    assert len(list(tmp_path.glob("traced-*"))) == 1


def test_the_second_use_reads_the_first_ones_trace(monkeypatch):
    import coati_perf.flops.traced as module

    first = CostModel.traced(CONFIG)
    monkeypatch.setattr(module, "_trace_on", None)
    assert same(CostModel.traced(CONFIG), first)
    changed = transformers.LlamaConfig(**{**CONFIG.to_dict(), "num_hidden_layers": 3})
    with pytest.raises(TypeError):
        CostModel.traced(changed)
    with pytest.raises(TypeError):
        CostModel.traced(CONFIG, gradient_checkpointing=True)


def test_someones_own_code_is_traced_anew(cache_folder):
    CostModel.traced(Critic())
    assert not cache_folder.exists()


def test_a_torn_trace_on_disk_is_made_anew(cache_folder):
    first = CostModel.traced(CONFIG)
    (file,) = cache_folder.glob("*.json")
    file.write_bytes(file.read_bytes()[:100])
    assert same(CostModel.traced(CONFIG), first)


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("COATI_PERF_CACHE", str(tmp_path / "file" / "below"))
    assert CostModel.traced(CONFIG).forward(100) > 0
    assert "tracing without it" in caplog.text
