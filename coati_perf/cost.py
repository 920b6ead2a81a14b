"""What the models' work on a batch comes to, over all models: amounts for the catalogue."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import msgspec
import torch

from coati_perf import catalogue
from coati_perf.flops import CostModel

# Above this no accelerator exists: dense bf16 TFLOP/s of one device, 2026.
ANY_DEVICE_PEAK_TFLOPS = 5000.0

# The roles of models that learn; each other scores only.
LEARNING_ROLES = ("actor", "critic")

# The convention where no model is known: nothing is counted.
NO_MODELS = "none"

Amounts = dict[str, float]


class Workload(Protocol):
    """Answers what a batch costs, as amounts of the metrics of the catalogue.

    Asked on a background thread: ``padded_…`` once per distinct shape, ``real_…`` with float64
    tensors of the lengths of one batch. What is in one of them is not in the other.
    """

    @property
    def convention(self) -> str:
        """The name under which the figures can be compared with others of the same name."""
        ...

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is to be known of the figures; kept in every record."""
        ...

    def padded_generation(self, batch: int, prompt: int, response: int) -> Amounts:
        """Return the cost of generating ``response`` tokens after each of ``batch`` prompts."""
        ...

    def padded_scoring(self, batch: int, length: int) -> Amounts:
        """Return the cost of the scoring forwards over (batch, length) tokens."""
        ...

    def padded_learning(self, batch: int, length: int) -> Amounts:
        """Return the cost of learning from (batch, length) tokens."""
        ...

    def real_generation(self, prompts: torch.Tensor, responses: torch.Tensor) -> Amounts:
        """Return the cost of generating the responses alone, without padding."""
        ...

    def real_scoring(self, lengths: torch.Tensor) -> Amounts:
        """Return the cost of the scoring forwards over the real tokens."""
        ...

    def real_learning(self, lengths: torch.Tensor) -> Amounts:
        """Return the cost of learning from the real tokens."""
        ...

    def generation_bytes(self, prompts: torch.Tensor, responses: torch.Tensor) -> Amounts:
        """Return what generating one batch moves to and from device memory, where known."""
        ...

    def describe(self) -> dict[str, Any]:
        """Plain data for the journal's header: all that the figures depend on."""
        ...


class ParamCount(msgspec.Struct, frozen=True):
    """The coati convention: 2 FLOP per parameter and token position.

    Source: the formulas that ColossalChat's evaluator documents (``shared/SEED.md``). It counts
    no attention, counts padding as work and every parameter as trained, and assumes that
    generation runs without a KV cache, so that it over-reports a PPO step by 30 to 2,500 times.
    Kept so that figures can be compared with those reported before.
    """

    actor: int
    critic: int
    initial: int
    reward: int
    grad_checkpoint: bool = False

    @property
    def any_model(self) -> bool:
        """Whether any model has parameters."""
        return any((self.actor, self.critic, self.initial, self.reward))

    @property
    def convention(self) -> str:
        return "coati"

    @property
    def warnings(self) -> tuple[str, ...]:
        return ()

    def generate(self, batch: int, prompt: int, response: int) -> int:
        """FLOP of generation, an exact integer."""
        # The prefixes run over are prompt, prompt + 1, …, prompt + response - 1 tokens long.
        # Their sum is (2 * prompt + response - 1) * response / 2; the 2 FLOP cancel the half.
        return self.actor * batch * (2 * prompt + response - 1) * response

    def score(self, batch: int, length: int) -> int:
        """FLOP of the scoring forwards, an exact integer."""
        return 2 * batch * length * (self.actor + self.critic + self.initial + self.reward)

    def learn(self, batch: int, length: int) -> int:
        """FLOP of learning, an exact integer."""
        # forward 1, backward 2, and one more forward where activations are recomputed
        passes = 3 + int(self.grad_checkpoint)
        return 2 * batch * length * (self.actor + self.critic) * passes

    def padded_generation(self, batch: int, prompt: int, response: int) -> Amounts:
        return {catalogue.GENERATE_FLOP: self.generate(batch, prompt, response)}

    def padded_scoring(self, batch: int, length: int) -> Amounts:
        return {catalogue.SCORE_FLOP: self.score(batch, length)}

    def padded_learning(self, batch: int, length: int) -> Amounts:
        return {catalogue.LEARN_FLOP: self.learn(batch, length)}

    def real_generation(self, prompts: torch.Tensor, responses: torch.Tensor) -> Amounts:
        return {}

    def real_scoring(self, lengths: torch.Tensor) -> Amounts:
        return {}

    def real_learning(self, lengths: torch.Tensor) -> Amounts:
        return {}

    def generation_bytes(self, prompts: torch.Tensor, responses: torch.Tensor) -> Amounts:
        return {}

    def describe(self) -> dict[str, Any]:
        return {
            "actor_num_params": self.actor,
            "critic_num_params": self.critic,
            "initial_model_num_params": self.initial,
            "reward_model_num_params": self.reward,
            "enable_grad_checkpoint": self.grad_checkpoint,
        }


class ModelCosts:
    """The cost models of PPO's or GRPO's models by role: ``actor``, ``critic``, ``initial``, ….

    The actor generates; each model scores; actor and critic learn. Padding is executed and not
    useful work, and so is what gradient checkpointing computes again.
    """

    def __init__(self, models: Mapping[str, CostModel]) -> None:
        self.models = dict(models)
        self._actor = self.models.get("actor")
        self._learning = [self.models[role] for role in LEARNING_ROLES if role in models]

    @property
    def convention(self) -> str:
        conventions = dict.fromkeys(model.convention for model in self.models.values())
        return " and ".join(conventions) or NO_MODELS

    @property
    def warnings(self) -> tuple[str, ...]:
        return tuple(
            f"{role}: {warning}"
            for role, model in self.models.items()
            for warning in model.warnings
        )

    def padded_generation(self, batch: int, prompt: int, response: int) -> Amounts:
        if self._actor is None or not batch:
            return {}
        flop = float(self._actor.generate([prompt] * batch, [response] * batch).sum())
        return {catalogue.GENERATE_EXECUTED: flop}

    def padded_scoring(self, batch: int, length: int) -> Amounts:
        if not self.models:
            return {}
        lengths = [length] * batch
        flop = sum(float(model.forward(lengths).sum()) for model in self.models.values())
        return {catalogue.SCORE_EXECUTED: flop}

    def padded_learning(self, batch: int, length: int) -> Amounts:
        if not self._learning:
            return {}
        lengths = [length] * batch
        flop = sum(
            float(model.forward_backward(lengths, executed=True).sum()) for model in self._learning
        )
        return {catalogue.LEARN_EXECUTED: flop}

    def real_generation(self, prompts: torch.Tensor, responses: torch.Tensor) -> Amounts:
        if self._actor is None:
            return {}
        return {catalogue.GENERATE_FLOP: float(self._actor.generate(prompts, responses).sum())}

    def real_scoring(self, lengths: torch.Tensor) -> Amounts:
        if not self.models:
            return {}
        flop = sum(float(model.forward(lengths).sum()) for model in self.models.values())
        return {catalogue.SCORE_FLOP: flop}

    def real_learning(self, lengths: torch.Tensor) -> Amounts:
        if not self._learning:
            return {}
        flop = sum(float(model.forward_backward(lengths).sum()) for model in self._learning)
        return {catalogue.LEARN_FLOP: flop}

    def generation_bytes(self, prompts: torch.Tensor, responses: torch.Tensor) -> Amounts:
        if self._actor is None or self._actor.memory is None:
            return {}
        return {catalogue.GENERATE_BYTES: self._actor.generate_bytes(prompts, responses)}

    def describe(self) -> dict[str, Any]:
        return {role: model.describe() for role, model in self.models.items()}
