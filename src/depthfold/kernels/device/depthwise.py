"""Kernels for depthwise convolutions of an odd size K x K, with the batch norm and the clamp before them.

A program walks down the rows of some images. Its tile has strips and channels: a strip is a few neighbouring pixels of
a row, so that a pixel is loaded once for all columns of the weights. The next row is loaded before the current one is
used, because a program would mostly wait for memory otherwise. The rows of the next image follow without a break.
"""

from __future__ import annotations

import triton
import triton.language as tl

from depthfold.kernels.device.clamp import clamp

SIZES = ["N", "H", "W", "out_h", "out_w", "eights", "pad_h", "pad_w", "blocks", "images"]


@triton.jit
def _zeros(NUMBER: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    values = ()
    for _ in tl.static_range(NUMBER):
        values = values + (tl.zeros([ROWS, COLUMNS], tl.float32),)
    return values


@triton.jit
def _taps(weight, c, C, K: tl.constexpr):
    """Load the weights of the channels, which are [C, K * K]."""
    taps = ()
    for k in tl.static_range(K * K):
        taps = taps + (tl.load(weight + c * (K * K) + k, mask=c < C, other=0.0).to(tl.float32)[None, :],)
    return taps


@triton.jit
def _scale_and_shift(statistics, c, C, NORM: tl.constexpr):
    scale = tl.load(statistics + 2 * C + c, mask=(c < C) & NORM, other=0.0)[None, :]
    shift = tl.load(statistics + 3 * C + c, mask=(c < C) & NORM, other=0.0)[None, :]
    return scale, shift


@triton.jit
def _load(source, n, h, w, c, H, W, C, more, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Load rows h, h + 1, ... of image n, columns w, w + 1, ... each. Pixels outside the map are 0."""
    values = ()
    for i in tl.static_range(ROWS):
        row = source + (n * H + h + i).to(tl.int64) * W * C
        valid = (c < C)[None, :] & (more & (h + i >= 0) & (h + i < H))
        for j in tl.static_range(COLUMNS):
            mask = ((w + j >= 0) & (w + j < W))[:, None] & valid
            values = values + (tl.load(row + (w + j)[:, None] * C + c[None, :], mask=mask, other=0.0),)
    return values


@triton.jit
def _activate(
    raw, h, w, H, W, scale, shift, cap,
    NORM: tl.constexpr, CAP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Normalise and clamp what `_load` returned. Pixels outside the map are 0 again."""
    values = ()
    for i in tl.static_range(ROWS):
        for j in tl.static_range(COLUMNS):
            v = raw[i * COLUMNS + j].to(tl.float32)
            if NORM:
                inside = ((h + i >= 0) & (h + i < H)) & ((w + j >= 0) & (w + j < W))[:, None]
                v = v * scale + shift
                if CAP:
                    v = clamp(v, tl.where(inside, cap, 0.0))
                else:
                    v = tl.where(inside, v, 0.0)
            values = values + (v,)
    return values


@triton.jit
def _add_row(total, row, taps, START: tl.constexpr, TAP: tl.constexpr, K: tl.constexpr):
    """Add K neighbouring pixels times one row of the weights."""
    for j in tl.static_range(K):
        total += row[START + j] * taps[TAP + j]
    return total


@triton.jit
def _advance(carry, row, taps, zero, K: tl.constexpr, STRIDE: tl.constexpr, STRIP: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the output row that the new input rows complete, and the sums of the rows that are not complete yet.

    The sums are in the order of the output rows. Row i of the new ones meets row AGE * STRIDE + i of the weights, where
    AGE is the number of steps since the output row began.
    """
    done = ()
    rest = ()
    DELAY: tl.constexpr = (K - 1) // STRIDE
    for slot in tl.static_range(DELAY + 1):
        for p in tl.static_range(STRIP):
            total = zero
            if slot < DELAY:
                total = carry[slot * STRIP + p]
            for i in tl.static_range(STRIDE):
                if (DELAY - slot) * STRIDE + i < K:
                    total = _add_row(total, row, taps, i * COLUMNS + STRIDE * p, ((DELAY - slot) * STRIDE + i) * K, K)
            if slot == 0:
                done = done + (total,)
            else:
                rest = rest + (total,)
    return done, rest


@triton.jit(do_not_specialize=SIZES)
def depthwise_forward(
    x, weight, statistics, pivot, y, sums, N, H, W, out_h, out_w, eights, pad_h, pad_w, blocks, images, cap,
    K: tl.constexpr, STRIDE: tl.constexpr, NORM: tl.constexpr, CAP: tl.constexpr, SUMS: tl.constexpr,
    STRIP: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Convolve, and sum y - pivot and its square over the pixels of each program."""
    C = eights * 8
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    program = tl.program_id(1)
    w = ((program % blocks) * BLOCK_W + tl.arange(0, BLOCK_W)) * STRIP
    left = w * STRIDE - pad_w
    COLUMNS: tl.constexpr = (STRIP - 1) * STRIDE + K
    DELAY: tl.constexpr = (K - 1) // STRIDE  # rows of x that are read before the first row of y is complete
    scale, shift = _scale_and_shift(statistics, c, C, NORM)
    centre = tl.load(pivot + c, mask=(c < C) & SUMS, other=0.0).to(tl.float32)[None, :]
    taps = _taps(weight, c, C, K)
    zero = tl.zeros([BLOCK_W, BLOCK_C], tl.float32)
    total, square = zero, zero
    carry = _zeros(STRIP * DELAY, BLOCK_W, BLOCK_C)
    n = program // blocks * images
    end = tl.minimum(n + images, N)
    # Rows of zeros above the map can be left out if as many below the image before leave the sums at zero.
    first = tl.minimum(tl.minimum(pad_h, out_h + K - 1 - H - pad_h), K - 1) if STRIDE == 1 else 0
    r = first
    loaded = _load(x, n, r * STRIDE - pad_h, left, c, H, W, C, n < end, STRIDE, COLUMNS)
    for _ in range((end - n) * (out_h + DELAY - first)):
        raw, image, h = loaded, n, r
        n = tl.where(r == out_h + DELAY - 1, n + 1, n)
        r = tl.where(r == out_h + DELAY - 1, first, r + 1)
        loaded = _load(x, n, r * STRIDE - pad_h, left, c, H, W, C, n < end, STRIDE, COLUMNS)
        values = _activate(raw, h * STRIDE - pad_h, left, H, W, scale, shift, cap, NORM, CAP, STRIDE, COLUMNS)
        done, carry = _advance(carry, values, taps, zero, K, STRIDE, STRIP, COLUMNS)
        row = y + (image * out_h + h - DELAY).to(tl.int64) * out_w * C
        for p in tl.static_range(STRIP):
            mask = ((w + p < out_w) & (h >= DELAY))[:, None] & (c < C)[None, :]
            value = done[p].to(y.dtype.element_ty)
            tl.store(row + (w + p)[:, None] * C + c[None, :], value, mask=mask)
            if SUMS:
                d = tl.where(mask, value.to(tl.float32) - centre, 0.0)
                total += d
                square += d * d
    if SUMS:
        base = sums + program * 2 * C + c
        tl.store(base, tl.sum(total, 0), mask=c < C)
        tl.store(base + C, tl.sum(square, 0), mask=c < C)


@triton.jit
def _as_float(values, NUMBER: tl.constexpr):
    result = ()
    for i in tl.static_range(NUMBER):
        result = result + (values[i].to(tl.float32),)
    return result


@triton.jit
def _clamp(raw, inside, scale, shift, cap, NORM: tl.constexpr, CAP: tl.constexpr):
    """Return the normalised and clamped value, which is 0 outside the map, and where its derivative is not 0."""
    v = raw
    if NORM:
        v = raw * scale + shift
    if CAP:
        limit = tl.where(inside, cap, 0.0)
        live = (v > 0.0) & (v < limit)
        v = clamp(v, limit)
    else:
        live = inside
        v = tl.where(inside, v, 0.0)
    return v, live


@triton.jit
def _multiply(
    window, taps, dw, v, live, zero, I: tl.constexpr, J: tl.constexpr, K: tl.constexpr, STRIDE: tl.constexpr,
    PHASE_H: tl.constexpr, PHASE_W: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Visit the outputs that read pixel (I, J), each with one weight: add to the gradients of pixel and weight."""
    d = zero
    TOP: tl.constexpr = (STRIDE - 1 + PHASE_H) // STRIDE
    LEFT: tl.constexpr = (K - 1 - PHASE_W) // STRIDE
    result = ()
    for k in tl.static_range(K * K):
        new = dw[k]
        if (I + PHASE_H - k // K) % STRIDE == 0 and (J + PHASE_W - k % K) % STRIDE == 0:
            g = window[(TOP - (I + PHASE_H - k // K) // STRIDE) * COLUMNS + LEFT + (J + PHASE_W - k % K) // STRIDE]
            d += g * taps[k]
            new += v * g
        result = result + (new,)
    return tl.where(live, d, 0.0), result


@triton.jit
def _store_sums(
    dw_sums, dw, norm_sums, one, two, statistics, c, C, program, TAPS: tl.constexpr, NORM: tl.constexpr
):  # fmt: skip
    base = dw_sums + program.to(tl.int64) * TAPS * C + c
    for k in tl.static_range(TAPS):
        tl.store(base + k * C, tl.sum(dw[k], 0), mask=c < C)
    if NORM:
        mean = tl.load(statistics + c, mask=c < C, other=0.0)
        rstd = tl.load(statistics + C + c, mask=c < C, other=0.0)
        base = norm_sums + program * 2 * C + c
        tl.store(base, tl.sum(one, 0), mask=c < C)
        tl.store(base + C, (tl.sum(two, 0) - mean * tl.sum(one, 0)) * rstd, mask=c < C)


@triton.jit(do_not_specialize=SIZES)
def depthwise_backward(
    x, weight, statistics, dy, dx, dw_sums, norm_sums, N, H, W, out_h, out_w, eights, pad_h, pad_w, blocks, images, cap,
    K: tl.constexpr, STRIDE: tl.constexpr, PHASE_H: tl.constexpr, PHASE_W: tl.constexpr, NORM: tl.constexpr,
    CAP: tl.constexpr, STRIP: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of the map and of the weights, and the sums for the gradient of the batch norm.

    A step of the loop covers as many rows of x as the stride. `window` has the rows of dy that read them, the last one
    first. PHASE_H and PHASE_W are the paddings modulo the stride.
    """
    C = eights * 8
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    program = tl.program_id(1)
    w = ((program % blocks) * BLOCK_W + tl.arange(0, BLOCK_W)) * STRIP
    left = w // STRIDE + pad_w // STRIDE - (K - 1 - PHASE_W) // STRIDE
    COLUMNS: tl.constexpr = (STRIP - 1 + PHASE_W) // STRIDE + (K - 1 - PHASE_W) // STRIDE + 1
    OLDER: tl.constexpr = (K - 1) // STRIDE  # rows of the window from earlier steps
    scale, shift = _scale_and_shift(statistics, c, C, NORM)
    taps = _taps(weight, c, C, K)
    zero = tl.zeros([BLOCK_W, BLOCK_C], tl.float32)
    one, two = zero, zero
    dw, window = _zeros(K * K, BLOCK_W, BLOCK_C), _zeros(OLDER * COLUMNS, BLOCK_W, BLOCK_C)
    n = program // blocks * images
    end = tl.minimum(n + images, N)
    top = pad_h // STRIDE + (STRIDE - 1 + PHASE_H) // STRIDE  # the last row of dy that reads the first rows of x
    last = (H - 1) // STRIDE
    # The rows above dy are zeros: those that the image before leaves in the window, or else rows that are loaded.
    first = -tl.minimum(tl.maximum(top, OLDER - tl.maximum(last + top + 1 - out_h, 0)), OLDER)
    r = first
    new_dy = _load(dy, n, r + top, left, c, out_h, out_w, C, n < end, 1, COLUMNS)
    new_x = _load(x, n, r * STRIDE, w, c, H, W, C, n < end, STRIDE, STRIP)
    for _ in range((end - n) * (last + 1 - first)):
        raw, image, h = _as_float(new_x, STRIDE * STRIP), n, r * STRIDE
        window = _as_float(new_dy, COLUMNS) + window
        n = tl.where(r == last, n + 1, n)
        r = tl.where(r == last, first, r + 1)
        new_dy = _load(dy, n, r + top, left, c, out_h, out_w, C, n < end, 1, COLUMNS)
        new_x = _load(x, n, r * STRIDE, w, c, H, W, C, n < end, STRIDE, STRIP)
        for i in tl.static_range(STRIDE):
            row = dx + (image * H + h + i).to(tl.int64) * W * C
            for j in tl.static_range(STRIP):
                inside = ((w + j < W) & (h >= 0) & (h + i < H))[:, None]
                v, live = _clamp(raw[i * STRIP + j], inside, scale, shift, cap, NORM, CAP)
                d, dw = _multiply(window, taps, dw, v, live, zero, i, j, K, STRIDE, PHASE_H, PHASE_W, COLUMNS)
                at = row + (w + j)[:, None] * C + c[None, :]
                tl.store(at, d.to(dx.dtype.element_ty), mask=inside & (c < C)[None, :])
                if NORM:
                    one += d
                    two += d * raw[i * STRIP + j]
        window = window[: OLDER * COLUMNS]
    _store_sums(dw_sums, dw, norm_sums, one, two, statistics, c, C, program, K * K, NORM)
