"""Switches laid over the product of the Hopper forward kernel, that can be combined: "own+unseen" and so on.

Ends of query tiles (short causal lengths):
  own      each consumer asks which key tiles are full for its own 64 rows: fewer tiles evaluate the mask (d64, d256)
  unseen   (brings own) no softmax where its rows see nothing of a key tile (not with the hot loop's order at d128)
  quick    LSE and 1 / sum by the approximate instructions: write_rows takes 202 -> about 150 instructions at d64
  ahead    the board's next slot is waited for and read while the last tile's products run
Choices of the product, undone or moved:
  early    the next query tile is drawn at the beginning of this one, as it was         draw1   one key tile before the end
  noskip   row maxima move always, accumulators are multiplied always                   skipif  maxima stay, but multiply always
  fmax     row maxima of floats            noopaq  Q's buffer number as it is
  hot64    a hot loop at d64 (order of waiting as without)      edgemax  d128: edge tiles wait after the maximum
"""


POLY = '''
@gluon.constexpr_function
def _exp2_mixed_assembly(share):
    """Of share numbers one by polynomial on the FMA units, the others by the special function unit."""
    text = "{ .reg .f32 x, r, f, y; .reg .s32 n, i; "
    for i in range(share - 1):
        text += f"ex2.approx.ftz.f32 ${i}, ${share + i}; "
    last, x = share - 1, 2 * share - 1
    text += f"max.f32 x, ${x}, 0fC2FC0000; add.rn.f32 r, x, 0f4B400000; sub.rn.f32 f, r, 0f4B400000; sub.rn.f32 f, x, f; "
    # 2^f on [-1/2, 1/2], degree 3
    text += "fma.rn.f32 y, f, 0f3D5FA700, 0f3E77BAF5; fma.rn.f32 y, f, y, 0f3F317D30; fma.rn.f32 y, f, y, 0f3F800000; "
    text += f"mov.b32 n, r; mov.b32 i, y; shl.b32 n, n, 23; add.s32 i, i, n; mov.b32 ${last}, i; }}"
    return text


@gluon.constexpr_function
def _exp2_mixed_registers(share):
    return ",".join(["=&f"] * share + ["f"] * share)


@gluon.jit
def _exp2_mixed(x, SHARE: gl.constexpr):
    return gl.inline_asm_elementwise(_exp2_mixed_assembly(SHARE), _exp2_mixed_registers(SHARE), [x], dtype=gl.float32, is_pure=True, pack=SHARE)


'''


OLD_LOOP = '        keep = is_first == 0  # else P V of this tile, the first of its query tile, begins a new sum\n        is_first = step == first  # the next one\n        stage, phase = _next(stage, phase, SIZES.stages)\n        step -= 1\n        if is_first:\n            if SIZES.wait_after == "exponentials":\n                finished = (row_max, row_sum)\n                row_max, row_sum = forward_parts.fresh_statistics(row_max, row_sum)\n            slot_before = slot\n            slot, slot_phase = _next(slot, slot_phase, SIZES.slots)\n            q_buffer, q_phase = _next(q_buffer, q_phase, SIZES.q_buffers)\n            mbarrier.wait(rings.posted.index(slot), slot_phase)\n            live, first, full_first, full_end, last = schedule.read_walk(rings.board, slot)\n            step = last - 1\n            mbarrier.wait(rings.q_full.index(q_buffer), q_phase, pred=live)\n        if SIZES.hot_loop:\n            # Key tiles in the middle. Without branches the compiler puts more of the softmax under the products.\n            stop = gl.where(is_first | (step >= full_end), step + 1, gl.maximum(full_first, first + 1))\n            while step >= stop:\n                acc, p, row_max, row_sum = _key_tile(\n                    CONSUMER, rings, out, seqlen_q, seqlen_k, softmax_scale, mask, score, sinks_ptr, tiles, scales,\n                    _Walk(step, first, full_first, full_end, is_first, keep, stage, phase, q_buffer, slot, slot_before),\n                    (acc, p, row_max, row_sum), finished, False, SIZES,\n                )  # fmt: skip\n                keep = live  # that is, true\n                stage, phase = _next(stage, phase, SIZES.stages)\n                step -= 1\n'
NEW_LOOP = '        keep = is_first == 0  # else P V of this tile, the first of its query tile, begins a new sum\n        stage, phase = _next(stage, phase, SIZES.stages)\n        step -= 1\n        if SIZES.hot_loop:\n            # Key tiles that need no mask. Without branches the compiler puts more of the softmax under the products.\n            stop = gl.where(step >= full_end, step + 1, gl.maximum(full_first, first))\n            while step >= stop:\n                acc, p, row_max, row_sum = _key_tile(\n                    CONSUMER, rings, out, seqlen_q, seqlen_k, softmax_scale, mask, score, sinks_ptr, tiles, scales,\n                    _Walk(step, first, full_first, full_end, is_first, keep, stage, phase, q_buffer, slot, slot_before),\n                    (acc, p, row_max, row_sum), finished, False, SIZES,\n                )  # fmt: skip\n                keep = live  # that is, true\n                stage, phase = _next(stage, phase, SIZES.stages)\n                step -= 1\n        is_first = step < first  # the next one\n        if is_first:\n            if SIZES.wait_after == "exponentials":\n                finished = (row_max, row_sum)\n                row_max, row_sum = forward_parts.fresh_statistics(row_max, row_sum)\n            slot_before = slot\n            slot, slot_phase = _next(slot, slot_phase, SIZES.slots)\n            q_buffer, q_phase = _next(q_buffer, q_phase, SIZES.q_buffers)\n            mbarrier.wait(rings.posted.index(slot), slot_phase)\n            live, first, full_first, full_end, last = schedule.read_walk(rings.board, slot)\n            step = last - 1\n            mbarrier.wait(rings.q_full.index(q_buffer), q_phase, pred=live)\n'


def _swap(text, old, new, count=1):
    assert text.count(old) == count, (text.count(old), old)
    return text.replace(old, new)


def apply(options, texts):
    """Return the texts of forward, parts, sizes and schedule with ``options``, a set of names."""
    forward, parts, sizes, schedule = (texts[n] for n in ("forward", "parts", "sizes", "schedule"))
    known = {"own", "unseen", "quick", "ahead", "early", "draw1", "noskip", "skipif", "fmax", "noopaq", "hot64", "edgemax", "late", "draw6", "poly4", "poly8", "poly2", "noturn", "expwait", "exactly", "bounded", "lastedge", "hot256"}
    assert options <= known, options - known
    if options & {"own", "unseen"}:
        schedule = _swap(schedule, "FIELDS = gl.constexpr(16)", "FIELDS = gl.constexpr(32)")
        schedule = _swap(schedule, "def post(board, written, slot, at, first, full_first, full_end, last, PACKED: gl.constexpr):",
                         "def post(board, written, slot, at, first, last, own, PACKED: gl.constexpr):")
        schedule = _swap(schedule, "    _write(board, slot, 4, full_first)\n    _write(board, slot, 5, full_end)\n", """\
    for c in gl.static_range(len(own)):
        for i in gl.static_range(4):
            _write(board, slot, 16 + 4 * c + i, own[c][i])
""")
        schedule = _swap(schedule, "def read_walk(board, slot):", "def read_walk(board, slot, CONSUMER: gl.constexpr):")
        schedule = _swap(schedule, "return live, _read(board, slot, 3), _read(board, slot, 4), _read(board, slot, 5), _read(board, slot, 6)",
                         "OWN: gl.constexpr = 16 + 4 * CONSUMER\n"
                         "    bounds = (_read(board, slot, OWN), _read(board, slot, OWN + 1), _read(board, slot, OWN + 2), _read(board, slot, OWN + 3))\n"
                         "    return live, _read(board, slot, 3), _read(board, slot, 6), bounds")
        forward = _swap(forward, "            schedule.post(rings.board, rings.posted, slot, at, first, full_first, full_end, last, SIZES.packed)\n", """\
            own = (_own_tiles(mask, tiles, where, at, 0, SIZES), _own_tiles(mask, tiles, where, at, 1, SIZES))
            if SIZES.consumers == 3:
                own = own + (_own_tiles(mask, tiles, where, at, 2, SIZES),)
            schedule.post(rings.board, rings.posted, slot, at, first, last, own, SIZES.packed)
""")
        forward = _swap(forward, "@gluon.jit\ndef producer(", """\
@gluon.jit
def _own_tiles(mask, tiles, where, at, CONSUMER: gl.constexpr, SIZES: gl.constexpr):
    if tiles is None:
        block = gl.minimum(at.block * SIZES.consumers + CONSUMER, (where.seqlen_q - 1) // ROWS)  # a block of real rows
        return key_tiles(mask, tiles, where, block, ROWS, SIZES.block_n)
    else:
        return key_tiles(mask, tiles, where, at.block, ROWS * SIZES.consumers, SIZES.block_n)


@gluon.jit
def producer(""")
        forward = _swap(forward, "live, first, full_first, full_end, last = schedule.read_walk(rings.board, 0)",
                        "live, first, last, bounds = schedule.read_walk(rings.board, 0, CONSUMER)\n    seen_first, full_first, full_end, seen_end = bounds")
        forward = _swap(forward, "live, first, full_first, full_end, last = schedule.read_walk(rings.board, slot)",
                        "live, first, last, bounds = schedule.read_walk(rings.board, slot, CONSUMER)\n            seen_first, full_first, full_end, seen_end = bounds")
        forward = _swap(forward, "_Walk(step, first, full_first, full_end, is_first", "_Walk(step, first, seen_first, full_first, full_end, seen_end, is_first", 2)
        forward = _swap(forward, "    full_first: Any\n    full_end: Any\n", "    seen_first: Any\n    full_first: Any\n    full_end: Any\n    seen_end: Any\n")
    if "unseen" in options:
        start = forward.index("    if score is not None:\n        at = schedule.read_place")
        middle = forward.index('    if SIZES.wait_after == "maximum":\n')
        end = forward.index("@gluon.jit\ndef consumer(")
        logits, rest = forward[start:middle], forward[middle:end]
        inner = "".join("    " + line + "\n" if line else "\n" for line in logits.splitlines()).rstrip() + "\n"
        after = """\
    if SIZES.wait_after != "exponentials":
        p_fp32, alpha, row_max, row_sum = forward_parts.fold(s, row_max, row_sum, tile_max, scales)
    acc = forward_parts.rescale_if_needed(acc, alpha)
    return acc, gl.convert_layout(p_fp32.to(p.dtype), p.type.layout, assert_trivial=True), row_max, row_sum
"""
        new_after = """\
    SKIPS: gl.constexpr = EDGE and SIZES.wait_after != "exponentials"
    if SKIPS:
        p = gl.full_like(p, 0.0)
        if sees:
            p_fp32, alpha, row_max, row_sum = forward_parts.fold(s, row_max, row_sum, tile_max, scales)
            acc = forward_parts.rescale_if_needed(acc, alpha)
            p = gl.convert_layout(p_fp32.to(p.dtype), p.type.layout, assert_trivial=True)
        return acc, p, row_max, row_sum
    else:
        if SIZES.wait_after != "exponentials":
            p_fp32, alpha, row_max, row_sum = forward_parts.fold(s, row_max, row_sum, tile_max, scales)
        acc = forward_parts.rescale_if_needed(acc, alpha)
        return acc, gl.convert_layout(p_fp32.to(p.dtype), p.type.layout, assert_trivial=True), row_max, row_sum
"""
        head = """\
    tile_max = gl.full([ROWS], float("-inf"), gl.float32, layout=gl.SliceLayout(1, s.type.layout))
    sees = (step >= walk.seen_first) & (step < walk.seen_end)
    if (sees if EDGE and SIZES.wait_after != "exponentials" else True):
"""
        forward = forward[:start] + head + inner + "\n" + _swap(rest, after, new_after) + forward[end:]
    if "exactly" in options:  # as it was before quick
        parts = _swap(parts, "_log2(total) * LN2", "gl.log2(total) * LN2")
        parts = _swap(parts, "factor = _reciprocal(gl.where(empty, 1.0, total))", "factor = 1.0 / gl.where(empty, 1.0, total)")
    if "bounded" in options:  # a causal mask needs no look at the last key
        forward = _swap(forward, "        if start_n + SIZES.block_n > where.seqlen_k:\n            s = gl.where(offs_n < where.seqlen_k - start_n, s, float(\"-inf\"))\n",
            "        if not SIZES.queue:\n            if start_n + SIZES.block_n > where.seqlen_k:\n                s = gl.where(offs_n < where.seqlen_k - start_n, s, float(\"-inf\"))\n")
    if "ahead" in options:
        own = bool(options & {"own", "unseen"})
        read = "schedule.read_walk(rings.board, next_slot" + (", CONSUMER)" if own else ")")
        assert not own, "not together with own"
        forward = _swap(forward, """\
            slot, slot_phase = _next(slot, slot_phase, SIZES.slots)
            q_buffer, q_phase = _next(q_buffer, q_phase, SIZES.q_buffers)
            mbarrier.wait(rings.posted.index(slot), slot_phase)
            live, first, full_first, full_end, last = schedule.read_walk(rings.board, slot)
            step = last - 1
""", """\
            slot, slot_phase = _next(slot, slot_phase, SIZES.slots)
            q_buffer, q_phase = _next(q_buffer, q_phase, SIZES.q_buffers)
            live, first, full_first, full_end, last = next_walk
            step = last - 1
""")
        forward = _swap(forward, "    while live:\n        acc, p, row_max", f"""\
    next_walk = (live, first, full_first, full_end, last)
    while live:
        if step == first:
            next_slot, next_phase = _next(slot, slot_phase, SIZES.slots)
            mbarrier.wait(rings.posted.index(next_slot), next_phase)
            next_walk = {read}
        acc, p, row_max""")
    if "early" in options:
        forward = _swap(forward, "gl.where(steps > SHORT_WALK, steps - DRAW_AHEAD, 0)", "steps * 0")
    if "late" in options:
        forward = _swap(forward, "gl.where(steps > SHORT_WALK, steps - DRAW_AHEAD, 0)", "gl.maximum(steps - DRAW_AHEAD, 0)")
    if "draw6" in options:
        forward = _swap(forward, "gl.constexpr(3), gl.constexpr(8)", "gl.constexpr(6), gl.constexpr(8)")
    if "draw1" in options:
        forward = _swap(forward, "gl.constexpr(3), gl.constexpr(8)", "gl.constexpr(1), gl.constexpr(2)")
    if "noskip" in options:
        parts = _swap(parts, "    new_max = gl.where((new_max - row_max) * scale_log2 > SLACK, new_max, row_max)\n", "")
    if options & {"noskip", "skipif"}:
        forward = forward.replace("forward_parts.rescale_if_needed(acc, alpha)", "forward_parts.scale_rows(acc, alpha)")
    if "fmax" in options:
        start, end = parts.index("    COUNT: gl.constexpr = s.shape[1] // 2\n    by_thread"), parts.index("    largest = gl.max(")
        parts = _swap(parts[:start] + parts[end:], "_by_thread(_first_columns(by_thread))", "_by_thread(s)")
    if "noopaq" in options:
        forward = _swap(forward, " + gl.minimum(step, 0)\n", "\n")
    if "lastedge" in options:  # as it was: the last key tile of a walk is taken with branches
        forward = _swap(forward, NEW_LOOP, OLD_LOOP)
        forward = _swap(forward, "    barriers.arrive_if(step == walk.first, SIZES.q_free", "    if EDGE:\n        barriers.arrive_if(step == walk.first, SIZES.q_free")
    if "hot64" in options:
        sizes = _swap(sizes, "hot_loop = config.consumers == 2 and 64 < max(columns, columns_v) <= 128", "hot_loop = max(columns, columns_v) <= 128")
        sizes = _swap(sizes, '"exponentials" if hot_loop else', '"exponentials" if hot_loop and config.consumers == 2 else')
    if "hot256" in options:
        sizes = _swap(sizes, "hot_loop = config.consumers == 2 and 64 < max(columns, columns_v) <= 128", "hot_loop = config.consumers == 2 and 64 < max(columns, columns_v)")
        sizes = _swap(sizes, '"exponentials" if hot_loop else', '"exponentials" if hot_loop and max(columns, columns_v) <= 128 else')
    if "edgemax" in options:
        edge = '(SIZES.wait_after == "maximum" or (EDGE and SIZES.hot_loop))'
        forward = _swap(forward, '    if SIZES.wait_after == "maximum":', f"    LATE: gl.constexpr = SIZES.wait_after == \"exponentials\" and not EDGE\n    if {edge}:")
        forward = _swap(forward, '    if SIZES.wait_after == "exponentials":\n        p_fp32', "    if LATE:\n        p_fp32")
        forward = _swap(forward, '    if SIZES.wait_after != "exponentials":\n        p_fp32', "    if not LATE:\n        p_fp32")
    forward = _swap(forward, 'replay.options("hopper_forward"', 'replay.options("hopper_forward ' + "+".join(sorted(options)) + '"')
    for share in (2, 4, 8):
        if f"poly{share}" in options:
            parts = _swap(parts, "    p = gl.exp2(s * scale[:, None] - (new_max * scale)[:, None])\n", f"    p = _exp2_mixed(s * scale[:, None] - (new_max * scale)[:, None], {share})\n")
            parts = _swap(parts, "@gluon.jit\ndef fold(", POLY + "@gluon.jit\ndef fold(")
    if "noturn" in options:
        forward = _swap(forward, "    barriers.sync(SIZES.turn + CONSUMER, 256)\n", "")
        forward = _swap(forward, "    barriers.arrive(SIZES.turn + NEXT, 256)\n", "")
        forward = _swap(forward, "    if SIZES.consumers - 1 == CONSUMER:\n        barriers.arrive(SIZES.turn, 256)\n", "")
        forward = _swap(forward, "    if CONSUMER == 0:\n        barriers.sync(SIZES.turn, 256)\n", "")
    if "expwait" in options:
        sizes = _swap(sizes, 'else "maximum" if config.consumers == 2 else "nothing"', 'else "maximum"')
    return {"forward": forward, "parts": parts, "sizes": sizes, "schedule": schedule}
