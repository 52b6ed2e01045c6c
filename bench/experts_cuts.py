"""Ways to deal out and to hold a tile of experts' weights, timed and ranked for bench/experts.py.

`layers` is its Layers; a way is a Cut and a Frame of kernels/gpu/experts.py.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product

from minidflash.kernels import compiler
from minidflash.kernels.gpu import experts


def candidates(cols, kind, row):
    """Cuts worth a try: the rule's first."""
    width, size, registers = experts.UNIT[kind]
    units, own = -(-cols // width), experts.choose(cols, kind, row)
    found = [own]
    every = 8, 9, 10, 11, 12, 15, 16
    for warps, ahead, finishers, asked in product(every, (1, 2, 3, 4), (4, 2), (0, 2, 4)):
        each = -(-units // warps)
        flight, is_even = warps * each * ahead * size, units / (each * warps) > 0.9
        if not is_even or each * ahead * registers > 72 or not 30e3 < flight < 110e3:
            continue
        if asked and (row != "experts_down" or finishers == 2):
            continue
        found.append(experts.Cut(warps, each, ahead, finishers, asked))
    return list(dict.fromkeys(found))


def words(cut):
    return f"Cut({cut.warps}, {cut.units}, {cut.ahead}, {cut.finishers}, {cut.asked})"


def compile_all(device, tasks):
    """Compile what tasks (row, cols, kind, experts, cut, rows or a Frame, act) need, side by side, into the
    cache. Nothing on the emulator."""
    if device.arch not in compiler.ARCHES.values():
        return

    def one(task):
        row, cols, kind, count, cut, rows, act = task
        is_frame = isinstance(rows, experts.Frame)
        frame = rows if is_frame else experts.frame(cut, cols, kind, count, rows)
        defines = {
            name: str(value) for name, value in experts.defines_of(cut, cols, kind, frame, act).items()
        }
        compiler.compile_cubin(f"{row}_fast.cu", device.arch, defines)

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(one, tasks))


def spills(layers, row, defines):
    """Whether a kernel has local memory."""
    function = layers.backend.device.function(f"{row}_fast.cu", f"{row}_fast", defines)
    return getattr(function, "local_bytes", 0) > 0


def use(key, cut):
    experts.MEASURED.pop(key, None)
    if cut is not None:
        experts.MEASURED[key] = cut
    experts.choose.cache_clear()


def try_cuts(layers, rows, replays, is_late):
    """{row: {cut in words: {rows: us}}}, best first by the sum; those that spill are left out."""
    m, ranking = layers.model, {}
    for row, cols, call, act in (
        ("experts_up", m.width, layers.up, m.act[0]), ("experts_down", m.ffn, layers.down, 0)
    ):  # fmt: skip
        key, times = (cols, m.kind, row), {}
        cuts = candidates(*key)
        compile_all(
            layers.backend.device, [(row, cols, m.kind, m.experts, cut, n, act) for cut in cuts for n in rows]
        )
        for n in rows:
            layers.prepare(n, False)
            layers.up(0)
            for cut in cuts:
                if is_late():
                    break
                shape = experts.frame(cut, cols, m.kind, m.experts, n)
                defines = experts.defines_of(cut, cols, m.kind, shape, act)
                if spills(layers, row, defines):
                    continue
                use(key, cut)
                times.setdefault(words(cut), {})[n] = layers.time([call], replays)
        use(key, None)
        whole = {what: us for what, us in times.items() if len(us) == len(rows)}
        ranking[row] = dict(sorted(whole.items(), key=lambda item: sum(item[1].values())))
    return ranking


def variants(cols, kind, row, experts_, rows):
    """[(Cut, Frame)] of so many rows: with rings of each length and without, of a few cuts."""
    width, _, _ = experts.UNIT[kind]
    units, own, found = -(-cols // width), experts.choose(cols, kind, row), []
    natural = experts.frame(own, cols, kind, experts_, rows)
    cuts = [replace(own, warps=warps, units=-(-units // warps), ahead=1) for warps in (12, 15, 16, 23)]
    cuts += [replace(own, asked=2 - own.asked), replace(own, finishers=3)]
    for cut in dict.fromkeys([own, *cuts]):
        if cut != own and units / (cut.warps * cut.units) < 0.9:
            continue
        shapes = experts.frames(cut, cols, kind, experts_, natural.token_tiles)
        held = [shape for shape in shapes if shape.ring]
        found += [(cut, shape) for shape in held[:2]]
        if cut == own:
            found += [(cut, replace(held[0], ring=ring)) for ring in range(1, held[0].ring)] if held else []
            found += [(cut, shape) for shape in shapes if not shape.ring][:1]
    return list(dict.fromkeys(found))


def try_variants(layers, rows, replays, is_late):
    """{row: {rows: {variant in words: us}}}, best first, beside what is used now."""
    m, ranking, natural = layers.model, {}, experts.frame
    for row, cols, call, act in (
        ("experts_up", m.width, layers.up, m.act[0]), ("experts_down", m.ffn, layers.down, 0)
    ):  # fmt: skip
        tasks = {n: variants(cols, m.kind, row, m.experts, n) for n in rows}
        own = experts.choose(cols, m.kind, row)
        compile_all(
            layers.backend.device,
            list({(row, cols, m.kind, m.experts, *how, act) for hows in tasks.values() for how in hows}),
        )
        for n, hows in tasks.items():
            layers.prepare(n, False)
            times = {}
            for cut, frame in hows:
                if is_late():
                    break
                defines = experts.defines_of(cut, cols, m.kind, frame, act)
                if spills(layers, row, defines):
                    continue
                use((cols, m.kind, row), cut)
                experts.frame = lambda *_, frame=frame: frame
                is_own = (cut, frame) == (own, natural(own, cols, m.kind, m.experts, n))
                times[f"{words(cut)} {frame}{' own' if is_own else ''}"] = layers.time([call], replays)
            use((cols, m.kind, row), None)
            experts.frame = natural
            ranking.setdefault(row, {})[n] = dict(sorted(times.items(), key=lambda item: item[1]))
    return ranking


def try_strips(layers, rows, replays):
    """{tiles of a strip, about: us of up and down}, of a prompt."""
    layers.prepare(rows, False)
    own, times = experts.STRIP, {}
    for strip in (8, 12, own, 32, 48, 10**6):
        experts.STRIP = strip
        times[strip] = [layers.time([call], replays) for call in (layers.up, layers.down)]
    experts.STRIP = own
    return times
