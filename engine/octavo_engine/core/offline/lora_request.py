"""Which LoRA adapter a prompt is answered with, as vLLM's users write it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter by its name and its folder; names stand for one folder at a time.

    `lora_int_id` is vLLM's and of no effect: adapters are distinguished by their content.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str
    load_inplace: bool = False  # read the folder again: its files have changed

    def __post_init__(self) -> None:
        if not self.lora_name or not self.lora_path:
            raise ValueError("a LoRARequest needs a lora_name and a lora_path")
