"""What may be asked of a model of Hugging Face's, in one line of text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from coterie.options import Spec

PREFIX = "hf:"


def _joined(given: Any) -> Any:
    return tuple(part.strip() for part in given.split("+")) if isinstance(given, str) else given


class HuggingFaceSpec(Spec):
    """A model of Hugging Face's with a head for the task, trained whole, by its head alone, or through adapters."""

    kind: ClassVar[str] = "model"
    name: ClassVar[str] = "hf"
    citation: ClassVar[str] = "Wolf et al. 2020; LoRA: Hu et al. 2022"
    positional: ClassVar[str | None] = "folder"

    folder: str = Field(min_length=1, description="the folder of a saved model, or its name on the Hub")
    lora: int = Field(0, ge=0, description="rank of LoRA's adapters; 0 for none")
    targets: Annotated[tuple[str, ...], BeforeValidator(_joined)] = Field(
        (), description="layers with adapters: q, k, v, o of attention, or names; PEFT's choice for the model if empty"
    )
    alpha: float | None = Field(None, gt=0, description="adapters are scaled by alpha / lora; auto: twice the rank")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout on what enters an adapter")
    train: Literal["all", "head"] = Field("all", description="without adapters: what is trained")
    base: Literal["float32", "bfloat16", "float16"] | None = Field(
        None, description="type of what is frozen; auto: that of the run"
    )
    pad: int | None = Field(None, ge=0, description="number of the padding word; auto: what the model says")
    revision: str | None = Field(None, description="of a model on the Hub: its commit, branch or tag")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.lora:
            for name in ("targets", "alpha", "dropout"):
                if name in self.model_fields_set:
                    raise ValueError(f"{name} is given, but lora is 0: give the rank of the adapters, as in lora=8")
        elif self.train != "all":
            raise ValueError("train=head fits lora=0 alone: with adapters, they and the head are trained")
        if self.base is not None and not self.lora and self.train == "all":
            raise ValueError(f"base is {self.base}, but nothing is frozen: give lora, as in lora=8, or train=head")
        return self

    def with_absolute_folder(self) -> HuggingFaceSpec:
        """Name the same folder from wherever it is read; a name on the Hub stays as it is."""
        folder = Path(self.folder).expanduser()
        return self.model_copy(update={"folder": str(folder.absolute())}) if folder.is_dir() else self


def spec_of(name: str) -> HuggingFaceSpec | None:
    """Read a model's name if it is one of Hugging Face's."""
    return HuggingFaceSpec.parse(name.removeprefix(PREFIX)) if name.startswith(PREFIX) else None
