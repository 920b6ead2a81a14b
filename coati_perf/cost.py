"""Cost models: from the shape of a batch to floating-point operations (FLOP)."""

from __future__ import annotations

from typing import Protocol

import msgspec


class CostModel(Protocol):
    """Answers what a batch costs, summed over all models, in FLOP as exact integers.

    Called on the training thread once per distinct shape, so it must be quick and must not
    touch a device.
    """

    @property
    def convention(self) -> str:
        """The name under which the figures can be compared with others of the same name."""
        ...

    def generate(self, batch: int, prompt: int, response: int) -> int:
        """FLOP of generating ``response`` tokens after each of ``batch`` prompts."""
        ...

    def score(self, batch: int, length: int) -> int:
        """FLOP of the scoring forwards over (batch, length) tokens."""
        ...

    def learn(self, batch: int, length: int) -> int:
        """FLOP of learning from (batch, length) tokens."""
        ...

    def describe(self) -> dict[str, int | bool | str]:
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
    def convention(self) -> str:
        return "coati"

    def generate(self, batch: int, prompt: int, response: int) -> int:
        # The prefixes run over are prompt, prompt + 1, …, prompt + response - 1 tokens long.
        # Their sum is (2 * prompt + response - 1) * response / 2; the 2 FLOP cancel the half.
        return self.actor * batch * (2 * prompt + response - 1) * response

    def score(self, batch: int, length: int) -> int:
        return 2 * batch * length * (self.actor + self.critic + self.initial + self.reward)

    def learn(self, batch: int, length: int) -> int:
        # forward 1, backward 2, and one more forward where activations are recomputed
        passes = 3 + int(self.grad_checkpoint)
        return 2 * batch * length * (self.actor + self.critic) * passes

    def describe(self) -> dict[str, int | bool | str]:
        return {
            "actor_num_params": self.actor,
            "critic_num_params": self.critic,
            "initial_model_num_params": self.initial,
            "reward_model_num_params": self.reward,
            "enable_grad_checkpoint": self.grad_checkpoint,
        }


# Above this no accelerator exists: dense bf16 TFLOP/s of one device, 2026.
ANY_DEVICE_PEAK_TFLOPS = 5000.0
