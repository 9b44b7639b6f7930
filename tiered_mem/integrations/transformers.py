"""Hugging Face's Trainer, and what is built on it: TRL, axolotl, LLaMA-Factory. Run with transformers 5.23."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any, cast

import torch
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..activations.attachment import Attachment
from ..optim import tiered
from ..optimizer.registered import Overlap, Residency
from .tiering import Tiering, refuse_others

_log = logging.getLogger("tiered_mem.integrations")
_GIB = 1 << 30


class TieringCallback(Tiering, TrainerCallback):
    """Tiers a training: `Trainer(..., callbacks=[TieringCallback(optimizer="host")])`. `Tiering` has the arguments.

    The activations of the model's repeated blocks move from the first step on. When training ends, or begins anew
    after an error, the model and the optimizer are as they were. What is logged has three numbers more.

    The trainer looks at the norm of all gradients in each step, and clips them: overlap="backward" is refused.
    """

    _attachment: Attachment | None = None
    _prepared: Any = None
    _running = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._running:
            self._end()  # of a training that ended by an error, of which nobody is told
        refuse_others(_other_offloaders(args), "TieringCallback")
        if self._residency is not None:
            refuse_others(_zero_offload(args), f"TieringCallback(optimizer={self._residency!r})")
        if self._overlap == "backward":
            raise ValueError(
                'the Trainer looks at gradients between backward and step, and overlap="backward" has freed them '
                'by then: use overlap="forward"'
            )
        model, prepared = kwargs["model"], kwargs["optimizer"]
        manager = self.manager(args.device)
        self._running = True
        self._attachment = self._follow(model, partial(manager.attach, model))
        if self._residency is None:
            return
        if args.deepspeed is not None:
            _log.warning("the optimizer is DeepSpeed's: its states stay where that keeps them")
            return
        _replace(prepared, self._tiered(prepared.optimizer, manager))
        self._prepared = prepared

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._end()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if self._manager is None or logs is None:
            return
        stats = self._manager.stats()
        figures = {
            "tiered/offloaded_gib": int(stats["offloaded.bytes.total"]) / _GIB,
            "tiered/host_peak_gib": int(stats["host.used.peak"]) / _GIB,
            "tiered/late_reloads": int(stats["reloads_on_demand.total"]),
        }
        logs.update(figures)
        state.log_history[-1].update(figures)

    def _end(self) -> None:
        attachment, self._attachment = self._attachment, None
        prepared, self._prepared = self._prepared, None
        self._running = False
        if attachment is not None:
            attachment.remove()
        if prepared is not None:
            _replace(prepared, self._given_back(prepared.optimizer))
        self._close()


def enable(
    trainer: Trainer,
    *,
    optimizer: Residency | None = None,
    overlap: Overlap | None = None,
    **arguments: Any,
) -> TieringCallback:
    """Tiers what `trainer.train()` does, by a TieringCallback, whose arguments these are. Call it before `train`.

    The optimizer is tiered when it is made, so that the states of a checkpoint pass the device bucket by bucket;
    and all that report hear of the numbers. Returns the callback. Raises RuntimeError where the trainer has its
    optimizer already.
    """
    callback = TieringCallback(optimizer=optimizer, overlap=overlap, **arguments)
    if trainer.optimizer is not None:
        raise RuntimeError("the trainer has made its optimizer already: call enable before train")
    # With FSDP the parameters are others once the model is prepared, and the callback comes after that.
    if optimizer is not None and not (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled):
        theirs, options = trainer.optimizer_cls_and_kwargs or trainer.get_optimizer_cls_and_kwargs(
            trainer.args, cast(PreTrainedModel, trainer.model)
        )
        if isinstance(theirs, type):  # and not a function of the whole model: then the callback does it
            ours = tiered(theirs, manager=partial(callback.manager, trainer.args.device))
            trainer.optimizer_cls_and_kwargs = (ours, {**options, "residency": optimizer, "overlap": overlap})
    trainer.callback_handler.callbacks.insert(0, callback)
    return callback


def _replace(prepared: Any, optimizer: torch.optim.Optimizer) -> None:
    # accelerate's wrapper keeps methods of the optimizer that it was made with: it is made anew, in place.
    if optimizer is not prepared.optimizer:
        prepared.__init__(optimizer, device_placement=False, scaler=prepared.scaler)


def _other_offloaders(args: TrainingArguments) -> dict[str, object]:
    """The settings by which transformers, TRL or accelerate offload by themselves."""
    checkpointing = _read(args.activation_checkpointing_kwargs)
    fsdp = _read(args.fsdp_config) if args.fsdp else {}
    return {
        "activation_offloading=True": getattr(args, "activation_offloading", False),  # TRL's
        'activation_checkpointing_kwargs={"offload": True}': checkpointing.get("offload"),
        'fsdp_config={"cpu_offload": True}': fsdp.get("cpu_offload") or fsdp.get("offload_params"),
        'fsdp_config={"activation_cpu_offload": True}': fsdp.get("activation_cpu_offload"),
    }


def _zero_offload(args: TrainingArguments) -> dict[str, object]:
    """The setting by which DeepSpeed keeps the optimizer's states elsewhere."""
    plugin = getattr(args, "deepspeed_plugin", None)
    where = None if plugin is None else plugin.hf_ds_config.get_value("zero_optimization.offload_optimizer.device")
    return {f"DeepSpeed's zero_optimization.offload_optimizer.device={where!r}": where not in (None, "none")}


def _read(setting: str | dict[str, Any] | None) -> dict[str, Any]:
    """By the time of training transformers has read what was given as text or as a file."""
    return setting if isinstance(setting, dict) else {}
