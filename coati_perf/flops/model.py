"""The cost model of one model: from lengths of sequences to FLOP and bytes."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec
import torch
from torch import nn

from coati_perf.flops.head import Head
from coati_perf.flops.lengths import to_tensor
from coati_perf.flops.memory import Memory
from coati_perf.flops.skeleton import UntraceableModelError, skeleton_of
from coati_perf.flops.trace import Trace
from coati_perf.flops.undisturbed import undisturbed
from coati_perf.flops.work import Attention, Work

Lengths = int | Sequence[int] | torch.Tensor | Any
"""A length in tokens, or one per sequence: a list, a NumPy array or a one-dimensional tensor."""
Amount = Any
"""A float for a single length, else a float64 tensor with an element per sequence."""


class NotGenerativeError(ValueError):
    """A cost model was asked what generation costs, of a model that cannot generate."""


class BytesUnknownError(ValueError):
    """A cost model that counts FLOP alone was asked for bytes."""


class CostModel(abc.ABC):
    """What the passes of one model cost, in FLOP (a multiply-add is 2) and in bytes.

    Make one with ``traced``, ``from_num_params`` or ``custom``. Each answer is one figure per
    sequence, as float64, for all sequences given at once; a single length gives a float. By
    default it is the *useful* work: that of the real tokens. With ``executed`` it is what the
    devices run for one padded batch: each sequence as long as the longest, and what gradient
    checkpointing computes again.
    """

    source: str  # what the figures were derived from
    warnings: tuple[str, ...]  # what is to be known of the figures; kept in every record

    @staticmethod
    def traced(
        model: Any,
        *,
        attention: Attention = "causal",
        gradient_checkpointing: bool | None = None,
        dtype: torch.dtype = torch.bfloat16,
        fallback: Literal["error", "num_params"] = "error",
    ) -> CostModel:
        """Count a model exactly, by running it without memory or data.

        Args:
            model: a Hugging Face config of a causal LM, or any ``nn.Module`` that takes
                ``input_ids``; PEFT, DDP, FSDP and compiled ones too. It is left as it is.
                Frozen parameters are counted as frozen.
            attention: ``causal`` counts the keys that each query may see: what the devices have
                to do. ``full`` counts every pair, as the PaLM and Megatron figures do, and as
                kernels without a mask run.
            gradient_checkpointing: that learning runs with it; by default as the model is set.
            dtype: of weights and KV cache, for the bytes.
            fallback: ``num_params`` takes the parameter count, with a warning kept in every
                record, where the model can't be traced.

        Raises:
            UntraceableModelError: the model can't be counted exactly; says why.
            TypeError: ``model`` is neither a config nor a module.
        """
        from coati_perf.flops.traced import traced_cost  # noqa: PLC0415 - it returns our subclass

        try:
            return traced_cost(
                model,
                attention=attention,
                gradient_checkpointing=gradient_checkpointing,
                dtype=dtype,
            )
        except UntraceableModelError as error:
            if fallback == "error":
                raise
            warning = f"parameters counted, since the model cannot be traced: {error}"
            return ParamCountCost(num_params(model), (warning,))

    @staticmethod
    def by_convention(name: str, config: Any) -> CostModel:
        """Return what ``coati``, ``palm``, ``megatron``, ``verl`` or ``nemo_rl`` would report.

        Raises:
            ConventionError: there is no such convention, or it doesn't cover this architecture.
        """
        from coati_perf.flops.conventions import by_convention  # noqa: PLC0415 - as above

        return by_convention(name, config)

    @staticmethod
    def from_num_params(num_params: int) -> CostModel:
        """Count 2 FLOP per parameter and token, 6 to learn; no attention. KV cache assumed.

        This is the usual estimate and no exact figure: embeddings count as matrix work, and
        frozen weights as trained.
        """
        return ParamCountCost(num_params)

    @staticmethod
    def custom(
        *,
        forward: Callable[[torch.Tensor], torch.Tensor],
        backward: Callable[[torch.Tensor], torch.Tensor] | None = None,
        decode: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
        source: str = "custom functions",
    ) -> CostModel:
        """Take FLOP from functions of one's own, over float64 tensors of lengths.

        Args:
            forward: FLOP of a forward over each length.
            backward: FLOP of the backward alone, by default twice the forward's.
            decode: FLOP of decoding (context, new tokens) with a cache.
            source: where the functions come from, for the record.
        """
        return CustomCost(forward, backward, decode, source)

    def forward(
        self, length: Lengths, *, logits: Lengths | None = None, executed: bool = False
    ) -> Amount:
        """FLOP of a forward: scoring.

        ``logits`` is at how many positions the logits are computed, by default at all. Cost models
        that are not traced know no head, and it makes no difference to them.
        """
        return self._with_logits(self._forward, self.head.forward, length, logits, executed)

    def forward_backward(
        self, length: Lengths, *, logits: Lengths | None = None, executed: bool = False
    ) -> Amount:
        """FLOP of a forward and the backward of what is not frozen: learning.

        ``logits`` is at how many positions the logits are computed, as in ``forward``.
        """
        work = self._executed_forward_backward if executed else self._forward_backward
        per_position = self.head.forward + self.head.backward
        return self._with_logits(work, per_position, length, logits, executed)

    def prefill(self, length: Lengths, *, cached: Lengths = 0, executed: bool = False) -> Amount:
        """FLOP of filling the KV cache with a prompt, with the logits of its last token.

        The first ``cached`` tokens of it are there already, from a prefix cache.
        """
        return answer(self._prefill_rest, length, cached, executed=executed)

    def decode(self, context: Lengths, new_tokens: Lengths, *, executed: bool = False) -> Amount:
        """FLOP of ``new_tokens`` decode steps, the first with ``context`` tokens in the cache."""
        return answer(self._decode, context, new_tokens, executed=executed)

    def generate(
        self,
        prompt: Lengths,
        response: Lengths,
        *,
        shared_prompt: int = 1,
        cached: Lengths = 0,
        executed: bool = False,
    ) -> Amount:
        """FLOP of generating ``response`` tokens after each prompt, with a KV cache.

        The prefill gives the first token, each decode step one more. With ``shared_prompt`` = n,
        n responses share the prefill of their prompt, and each carries its n-th part. ``cached``
        is how many tokens of each prompt a prefix cache had.
        """

        def generate(
            prompts: torch.Tensor, responses: torch.Tensor, cached: torch.Tensor
        ) -> torch.Tensor:
            steps = (responses - 1).clamp(min=0)
            prefill = self._prefill_rest(prompts, cached)
            return prefill / shared_prompt + self._decode(prompts, steps)

        return answer(generate, prompt, response, cached, executed=executed)

    def forward_bytes(self, length: Lengths) -> float:
        """Bytes to and from device memory of a forward over one batch; see ``Memory``."""
        return self._known_memory().forward(to_tensor(length))

    def forward_backward_bytes(self, length: Lengths) -> float:
        """Bytes to and from device memory of learning from one batch."""
        return self._known_memory().forward_backward(to_tensor(length))

    def prefill_bytes(self, length: Lengths, *, cached: Lengths = 0) -> float:
        """Bytes to and from device memory of filling the KV cache with one batch of prompts."""
        return self._known_memory().prefill(to_tensor(length), to_tensor(cached))

    def decode_bytes(self, context: Lengths, new_tokens: Lengths) -> float:
        """Bytes to and from device memory of decoding one batch."""
        tensors = torch.broadcast_tensors(to_tensor(context), to_tensor(new_tokens))
        return self._known_memory().decode(*tensors)

    def generate_bytes(
        self,
        prompt: Lengths,
        response: Lengths,
        *,
        shared_prompt: int = 1,
        cached: Lengths = 0,
    ) -> float:
        """Bytes to and from device memory of generating one batch of responses."""
        prompts, responses, before = torch.broadcast_tensors(
            to_tensor(prompt), to_tensor(response), to_tensor(cached)
        )
        prefill = self.prefill_bytes(
            prompts.reshape(-1)[::shared_prompt], cached=before.reshape(-1)[::shared_prompt]
        )
        return prefill + self.decode_bytes(prompts, (responses - 1).clamp(min=0))

    @property
    @abc.abstractmethod
    def convention(self) -> str:
        """The name under which figures can be compared with others of the same name."""

    @abc.abstractmethod
    def describe(self) -> dict[str, Any]:
        """Plain data for the journal's header: all that the figures depend on."""

    @property
    def memory(self) -> Memory | None:
        """What the model keeps in device memory, where it is known."""
        return None

    @property
    def head(self) -> Head:
        """What the logits of one position cost; nothing where that is not known."""
        return Head()

    def _with_logits(
        self,
        work: Callable[[torch.Tensor], torch.Tensor],
        per_position: float,
        length: Lengths,
        logits: Lengths | None,
        executed: bool,  # noqa: FBT001
    ) -> Amount:
        if logits is None:
            return answer(work, length, executed=executed)

        def partly(lengths: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            return work(lengths) - per_position * (lengths - positions)

        return answer(partly, length, logits, executed=executed)

    def _known_memory(self) -> Memory:
        if self.memory is None:
            message = (
                f"the cost model from {self.source} counts FLOP and no bytes; expected one from"
                " CostModel.traced(…)"
            )
            raise BytesUnknownError(message)
        return self.memory

    @abc.abstractmethod
    def _forward(self, length: torch.Tensor) -> torch.Tensor: ...

    @abc.abstractmethod
    def _forward_backward(self, length: torch.Tensor) -> torch.Tensor: ...

    def _executed_forward_backward(self, length: torch.Tensor) -> torch.Tensor:
        return self._forward_backward(length)

    def _prefill(self, length: torch.Tensor) -> torch.Tensor:
        return self._forward(length)

    def _prefill_rest(self, length: torch.Tensor, cached: torch.Tensor) -> torch.Tensor:
        return self._prefill(length) - self._prefill(cached)

    @abc.abstractmethod
    def _decode(self, context: torch.Tensor, steps: torch.Tensor) -> torch.Tensor: ...


@dataclasses.dataclass(frozen=True)
class TracedCost(CostModel):
    """Closed forms that were read off the model itself: exact for every length."""

    trace: Trace
    executed_learning: Work
    source: str
    attention: Attention = "causal"
    warnings: tuple[str, ...] = ()

    @property
    def convention(self) -> str:
        return "exact" if self.attention == "causal" else "exact, full attention"

    @property
    def memory(self) -> Memory:
        return self.trace.memory

    @property
    def head(self) -> Head:
        return self.trace.head

    def _forward(self, length: torch.Tensor) -> torch.Tensor:
        return self.trace.forward.over(length, self.attention)

    def _forward_backward(self, length: torch.Tensor) -> torch.Tensor:
        return self.trace.forward_backward.over(length, self.attention)

    def _executed_forward_backward(self, length: torch.Tensor) -> torch.Tensor:
        return self.executed_learning.over(length, self.attention)

    def _prefill(self, length: torch.Tensor) -> torch.Tensor:
        return self._generative(self.trace.prefill).over(length, self.attention)

    def _prefill_rest(self, length: torch.Tensor, cached: torch.Tensor) -> torch.Tensor:
        # What does not grow with the length, such as the last token's logits, is computed anew.
        constant = self._generative(self.trace.prefill).constant * (cached > 0)
        return super()._prefill_rest(length, cached) + constant

    def _decode(self, context: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        return self._generative(self.trace.decode).decoding(context, steps, self.attention)

    def _generative(self, work: Work | None) -> Work:
        if work is None:
            message = (
                f"{self.source} cannot generate, so that prefill and decode have no cost; expected"
                " a causal LM. Ask for forward or forward_backward, or trace the model that"
                " generates"
            )
            raise NotGenerativeError(message)
        return work

    def describe(self) -> dict[str, Any]:
        return {
            "convention": self.convention,
            "source": self.source,
            "warnings": list(self.warnings),
            "formula": str(self),
            "trace": msgspec.to_builtins(self.trace),
            "executed_learning": msgspec.to_builtins(self.executed_learning),
        }

    def __str__(self) -> str:
        title = f"{self.source}, {self.convention}: FLOP of L tokens, or of a decode step after L"
        lines = [title]
        for name in ("forward", "forward_backward", "prefill", "decode"):
            work = getattr(self.trace, name)
            if work is not None:
                lines.append(f"  {name:<17} {work.formula()}")
        if self.executed_learning != self.trace.forward_backward:
            lines.append(f"  with checkpoints  {self.executed_learning.formula()}")
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class ParamCountCost(CostModel):
    """2 FLOP per parameter and token in a forward, 6 in a forward with backward."""

    num_params: int
    warnings: tuple[str, ...] = ()

    source = "the number of parameters"

    @property
    def convention(self) -> str:
        return "num_params"

    def _forward(self, length: torch.Tensor) -> torch.Tensor:
        return 2 * self.num_params * length

    def _forward_backward(self, length: torch.Tensor) -> torch.Tensor:
        return 6 * self.num_params * length

    def _decode(self, context: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        return 2 * self.num_params * steps

    def describe(self) -> dict[str, Any]:
        return {
            "convention": self.convention,
            "num_params": self.num_params,
            "warnings": list(self.warnings),
        }

    def __str__(self) -> str:
        return f"{self.num_params:,} parameters: 2 FLOP for each and token, 6 to learn"


@dataclasses.dataclass(frozen=True)
class CustomCost(CostModel):
    """FLOP from someone's own functions; see ``CostModel.custom``."""

    forward_function: Callable[[torch.Tensor], torch.Tensor]
    backward_function: Callable[[torch.Tensor], torch.Tensor] | None
    decode_function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None
    source: str
    warnings: tuple[str, ...] = ()

    @property
    def convention(self) -> str:
        return "custom"

    def _forward(self, length: torch.Tensor) -> torch.Tensor:
        return self.forward_function(length)

    def _forward_backward(self, length: torch.Tensor) -> torch.Tensor:
        forward = self.forward_function(length)
        if self.backward_function is None:
            return 3 * forward
        return forward + self.backward_function(length)

    def _decode(self, context: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        if self.decode_function is None:
            message = (
                f"the cost model from {self.source} has no decode function, so that generation has"
                " no cost. Give CostModel.custom(decode=…)"
            )
            raise NotGenerativeError(message)
        return self.decode_function(context, steps)

    def describe(self) -> dict[str, Any]:
        return {"convention": self.convention, "source": self.source, "warnings": []}


def num_params(model: Any) -> int:
    """Return the number of parameters of a module, or of the causal LM of a config.

    Raises:
        UntraceableModelError: the config's model can't be built.
    """
    with undisturbed():
        module = model if isinstance(model, nn.Module) else skeleton_of(model)
    return sum(parameter.numel() for parameter in module.parameters())


def answer(function: Callable[..., torch.Tensor], *lengths: Lengths, executed: bool) -> Amount:
    """Return a function's value for each sequence; with ``executed``, as long as the longest."""
    tensors = torch.broadcast_tensors(*(to_tensor(length) for length in lengths))
    if executed and tensors[0].numel():
        tensors = tuple(tensor.max().expand_as(tensor) for tensor in tensors)
    value = function(*tensors)
    return value.item() if value.dim() == 0 else value
