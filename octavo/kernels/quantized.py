"""QuantizedMatrix: a matrix of small unsigned integers with a scale, and perhaps a minimum, for each group of columns.

What checkpoints' blocks and quantisers become before a device packs it. Knows no file format.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

__all__ = ["QuantizedForm", "QuantizedMatrix", "round_to_int8"]


@dataclass(frozen=True, slots=True)
class QuantizedForm:
    """w[n, k] = scale · (value - zero) - min, with the scale and the min of row n and column group k // group."""

    bits: int
    """4 or 8: values are unsigned."""
    group: int
    """Columns that share a scale: 16 or 32."""
    zero: int
    has_mins: bool
    scale_dtype: torch.dtype
    """float16, or float32; always float32 in groups of 16."""

    @property
    def bytes_per_weight(self) -> float:
        """Packed, with its share of a scale and a minimum."""
        return self.bits / 8 + self.scale_dtype.itemsize * (1 + self.has_mins) / self.group

    def joined(self, other: "QuantizedForm") -> "QuantizedForm":
        """The narrowest form that holds the weights of both exactly."""
        group = min(self.group, other.group)
        same_scales = group == 32 and self.scale_dtype == other.scale_dtype
        return QuantizedForm(
            bits=self.bits if self.bits == other.bits and self.zero == other.zero else 8,
            group=group,
            zero=max(self.zero, other.zero),
            has_mins=self.has_mins or other.has_mins,
            scale_dtype=self.scale_dtype if same_scales else torch.float32,
        )


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """scale · (value - zero) is exact in float32, so that no order of operations changes a weight."""

    form: QuantizedForm
    values: torch.Tensor  # [num_rows, num_cols] uint8
    scales: torch.Tensor  # [num_rows, ceil(num_cols / group)] scale_dtype
    mins: torch.Tensor | None = None  # as scales, where the form has them

    def dequantized(self) -> torch.Tensor:
        """[num_rows, num_cols] float32"""
        values = self.values.float() - self.form.zero
        num_cols = self.values.shape[1]
        weight = _columns(self.scales, self.form.group, num_cols) * values
        return weight if self.mins is None else weight - _columns(self.mins, self.form.group, num_cols)

    def columns(self, columns: slice) -> "QuantizedMatrix":
        """Some columns; the first begins a group, the last ends one or the matrix."""
        group, num_columns = self.form.group, self.values.shape[1]
        if columns == slice(0, num_columns):
            return self
        if columns.start % group or (columns.stop % group and columns.stop != num_columns):
            raise ValueError(f"columns {columns.start} to {columns.stop} are not whole groups of {group}")
        groups = slice(columns.start // group, -(-columns.stop // group))
        return QuantizedMatrix(
            self.form,
            self.values[:, columns].contiguous(),
            self.scales[:, groups].contiguous(),
            None if self.mins is None else self.mins[:, groups].contiguous(),
        )

    @staticmethod
    def filled(form: QuantizedForm, num_rows: int, num_cols: int) -> "QuantizedMatrix":
        """A matrix of ones, to measure with."""
        values = torch.full((num_rows, num_cols), form.zero + 1, dtype=torch.uint8)
        scales = torch.ones((num_rows, -(-num_cols // form.group)), dtype=form.scale_dtype)
        return QuantizedMatrix(form, values, scales, torch.zeros_like(scales) if form.has_mins else None)

    def reformed(self, form: QuantizedForm) -> "QuantizedMatrix":
        """The same weights in a form that `joined` gave."""
        if form == self.form:
            return self
        shift = form.zero - self.form.zero
        assert not shift or int(self.values.max()) + shift < 1 << form.bits, (self.form, form)
        values = self.values + shift
        mins = torch.zeros_like(self.scales) if self.mins is None else self.mins
        scales, mins = self._regrouped(self.scales, form), self._regrouped(mins, form)
        return QuantizedMatrix(form, values, scales, mins if form.has_mins else None)

    def _regrouped(self, scales: torch.Tensor, form: QuantizedForm) -> torch.Tensor:
        num_groups = -(-self.values.shape[1] // form.group)
        repeated = scales.repeat_interleave(self.form.group // form.group, dim=1)
        return repeated[:, :num_groups].to(form.scale_dtype).contiguous()

    @staticmethod
    def stacked(parts: Sequence["QuantizedMatrix"]) -> "QuantizedMatrix":
        """The rows of all parts, one after the other, in the narrowest form that holds them."""
        form = parts[0].form
        for part in parts[1:]:
            form = form.joined(part.form)
        parts = [part.reformed(form) for part in parts]
        mins = [part.mins for part in parts if part.mins is not None]
        return QuantizedMatrix(
            form,
            torch.cat([part.values for part in parts]),
            torch.cat([part.scales for part in parts]),
            torch.cat(mins) if mins else None,
        )


def _columns(scales: torch.Tensor, group: int, num_cols: int) -> torch.Tensor:
    """[rows, groups] -> [rows, num_cols] float32"""
    return scales.float().repeat_interleave(group, dim=1)[:, :num_cols]


LARGEST_ACTIVATION = 2.0**110
"""Of those that are rounded to eight bits: kernels multiply their scale by 1.5 · 2²³."""


def round_to_int8(x: torch.Tensor, block: int) -> torch.Tensor:
    """x [T, K] float32, rounded to what eight bits hold: of each `block` columns the largest magnitude becomes 127.

    A block that holds a NaN, an infinity or a magnitude beyond 2^110 becomes NaN.
    """
    num_tokens, num_cols = x.shape
    blocks = F.pad(x, (0, -num_cols % block)).view(num_tokens, -1, block)
    largest = blocks.abs().amax(dim=-1, keepdim=True)
    scale = largest / 127
    rounded = torch.where(scale > 0, (blocks / scale).round() * scale, torch.zeros_like(blocks))
    return torch.where(largest <= LARGEST_ACTIVATION, rounded, torch.nan).view(num_tokens, -1)[:, :num_cols]
