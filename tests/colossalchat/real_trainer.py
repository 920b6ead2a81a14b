"""Runs the real ColossalChat PPO or GRPO trainer on the CPU, on each rank, and says what it ran.

``python real_trainer.py FOLDER KIND`` under torchrun or alone, with ``applications/ColossalChat``
of an upstream checkout and its packages on the path. Rank r writes ``FOLDER/rank-r.json``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import torch
import torch.distributed as dist

# The experience buffer's constructor asks for the device of a GPU.
torch.cuda.current_device = lambda: 0  # type: ignore[method-assign]

from coati.models import Critic, RewardModel
from coati.trainer import GRPOTrainer, PPOTrainer
from colossalai.booster import Booster
from colossalai.booster.plugin import TorchDDPPlugin
from colossalai.cluster import DistCoordinator
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from coati_perf_colossalchat import PerformanceEvaluator
from independent_count import executed_flop

PROMPT, LENGTH, PROMPTS = 12, 28, 4
EPISODES = 3


class Prompts(list):
    """A data loader: prompts padded left, from a fixed set."""

    def __init__(self, rank: int, batches: int = 4) -> None:
        generator = torch.Generator().manual_seed(rank)
        for _ in range(batches):
            ids = torch.randint(5, 60, (PROMPTS, PROMPT), generator=generator)
            for row in range(PROMPTS):
                ids[row, : row + 1] = 0
            mask = (ids != 0).long()
            super().append(
                {"input_ids": ids, "attention_mask": mask, "gt_answer": [None] * PROMPTS}
            )


def config() -> LlamaConfig:
    return LlamaConfig(
        num_hidden_layers=2, hidden_size=64, intermediate_size=128, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=60, pad_token_id=0, eos_token_id=1, bos_token_id=None,
        attn_implementation="eager",
    )  # fmt: skip


def tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<eos>", "<stop>", "<unk>", *(f"w{number}" for number in range(56))]
    inner = Tokenizer(WordLevel({w: n for n, w in enumerate(words)}, unk_token="<unk>"))
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def parts(model: torch.nn.Module) -> tuple[object, ...]:
    booster = Booster(plugin=TorchDDPPlugin())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    model, optimizer, _, _, scheduler = booster.boost(
        model=model, optimizer=optimizer, lr_scheduler=scheduler
    )
    return booster, model, optimizer, scheduler


def main(folder: Path, kind: str) -> None:
    rank = int(os.environ.get("RANK", "0"))
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", "0")
    dist.init_process_group("gloo")
    torch.manual_seed(rank)
    actor_booster, actor, actor_optimizer, actor_scheduler = parts(
        LlamaForCausalLM._from_config(config(), attn_implementation="eager")
    )
    common = {
        "actor_booster": actor_booster,
        "actor": actor,
        "reward_model": RewardModel(config=config()),
        "initial_model": LlamaForCausalLM._from_config(config(), attn_implementation="eager"),
        "actor_optim": actor_optimizer,
        "actor_lr_scheduler": actor_scheduler,
        "tokenizer": tokenizer(),
        "train_batch_size": 4,
        "ptx_coef": 0.0,
        "dataloader_pin_memory": False,
        "offload_inference_models": False,
        "save_dir": str(folder / "saved"),
        "use_cache": True,
        "max_length": LENGTH,
        "do_sample": True,
        "stop_token_ids": [[2]],
        "save_interval": 1000,
        "coordinator": DistCoordinator(),
    }
    counts = dict.fromkeys(
        ("actor_num_params", "critic_num_params", "initial_model_num_params"), 100_000
    ) | {"reward_model_num_params": 100_000}
    evaluator = PerformanceEvaluator(
        **counts, run_dir=folder / "run", save_path=folder / "report.txt", peak_tflops=1.0
    )
    if kind == "grpo":
        trainer = GRPOTrainer(
            **common, num_generation=2, inference_batch_size=3, logits_forward_batch_size=2,
            callbacks=[evaluator],
        )  # fmt: skip
    else:
        critic_booster, critic, critic_optimizer, critic_scheduler = parts(Critic(config=config()))
        trainer = PPOTrainer(
            **common, critic_booster=critic_booster, critic=critic, critic_optim=critic_optimizer,
            critic_lr_scheduler=critic_scheduler, callbacks=[evaluator],
        )  # fmt: skip
    evaluator.follow(trainer, attention="full")

    def fit() -> None:
        trainer.fit(EPISODES, 2, 1, prompt_dataloader=Prompts(rank), log_dir=str(folder / "logs"))

    flop = executed_flop(fit)
    (folder / f"rank-{rank}.json").write_text(json.dumps({"flop": flop}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
