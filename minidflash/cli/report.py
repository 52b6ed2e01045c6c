"""What `--stats` says about a run."""

from collections import Counter
from dataclasses import replace
from statistics import mean, median

from .terminal import amount, duration


def round_costs(engine, request):
    """Seconds of a round by rows verified, as the schedule knows them; measured now if it never had to.

    Returns {v: seconds}, {} for plain decoding, and for samples side by side, whose rounds cost more. The
    buffers' contents are lost: call it after the run.
    """
    if not request.drafts or engine.state is None or engine.state.slots > 1:
        return {}
    if not engine.schedule.seconds:
        from ..ahead import prepare

        prepare(engine, engine.state, replace(request, verify="auto"))
    return dict(engine.schedule.seconds)


def break_even(rounds, costs):
    """When drafting stops paying: (v, seconds of such a round, seconds of a plain one, tau needed), or None.

    v: the width most rounds of the run had, plain ones left out. Its cost is the run's own median; so is a
    plain round's where the run had some, else it is the schedule's.
    """
    widths = Counter(r.verify for r in rounds if r.verify > 1)
    if not widths or not costs.get(1):
        return None
    width = widths.most_common(1)[0][0]
    cost = median(r.seconds for r in rounds if r.verify == width)
    own = [r.seconds for r in rounds if r.verify == 1]
    plain = median(own) if len(own) >= 3 else costs[1]
    return width, cost, plain, cost / plain


def stats_lines(result, rounds, costs, ctx):
    """Lines for a person. result: Result. rounds: its Rounds. costs: of round_costs.
    ctx: positions of the engine."""
    stats, timing, memory = result.stats, result.timing, result.memory_bytes
    reused = f" ({stats.rows_reused} of them reused)" if stats.rows_reused else ""
    table = {
        "tokens": f"{result.prompt_tokens} in the prompt{reused}, {len(result.tokens)} new, "
        f"ended by {result.finish_reason}"
    }
    if stats.block is None:
        table["tau"] = "none: plain decoding"
    elif stats.tau is not None:
        table["tau"] = (
            f"{stats.tau:.2f} tokens a round (the target's own counted), {stats.round_count} rounds"
        )
        share = f" ({100 * stats.accepted / stats.drafted:.0f} %)" if stats.drafted else ""
        table["accepted"] = f"{stats.accepted} of {stats.drafted} verified drafts{share}"
        by_position = " ".join("-" if a is None else f"{a:.2f}" for a in stats.acceptance_by_position)
        table["by position"] = f"{by_position}  (1..{stats.block - 1}: accepted / reached)"
        widths = Counter(stats.verify).most_common()
        table["verify"] = ", ".join(f"{v} rows x {n}" for v, n in widths) + f"; block {stats.block}"
        found = break_even(rounds, costs)
        if found:
            width, cost, plain, needed = found
            table["break-even"] = (f"tau {needed:.2f}: a round of {width} rows takes {duration(cost)}, "
                                   f"a plain one {duration(plain)}")  # fmt: skip
    experts = [r.experts for r in rounds if r.experts is not None]
    if experts:
        table["experts"] = f"{mean(experts):.1f} distinct ones a layer and round, {max(experts):.1f} at most"
    rate = (
        f"{timing.tokens_per_s:.1f} tokens/s after the first"
        if timing.tokens_per_s
        else "no tokens after the first"
    )
    table["speed"] = f"{rate}; the first after {duration(timing.ttft_s)}"
    table["time"] = (f"prefill {duration(timing.prefill_s)}, decode {duration(timing.decode_s)}; before: "
                     f"load {duration(timing.load_s)}, kernels {duration(timing.jit_s)}")  # fmt: skip
    table["memory"] = (f"weights {amount(memory.weights)}, target cache {amount(memory.target_cache)}, "
                       f"drafter cache {amount(memory.drafter_cache)}, workspace {amount(memory.workspace)}; "
                       f"context {ctx}")  # fmt: skip
    table["machine"] = f"{result.backend}, {result.activations}, {result.machine}"
    return [f"{name:<12}{value}" for name, value in table.items()]
