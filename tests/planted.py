#!/usr/bin/env python3
"""Plants one fault in the kernels and expects ep_bench to fail on it under fixed seeds, with a message that names the cause.
Without a name: checks that every fault the kernels know has its line in the table below."""
import argparse
import re
import subprocess
import sys

# What the message must say. Every fault is the emulator's to find, not only a wrong byte at the end.
CAUSES = {
    "flag-relaxed": r"data race\].*stored without release",
    "no-fence-store": r"missing proxy fence\].*bulk store reads shared",
    "no-fence-load": r"missing proxy fence\].*bulk load reads window.*no fence\.proxy\.async \(global\)",
    "stage-reuse": r"wait_group\.read missing",
    "wait-read": r"data race\].*not complete \(wait_group without \.read\) before the flag's release",
    "signal-first": r"data race\].*not complete \(wait_group without \.read\) before the flag's release",
    "slot-off-by-one": r"tokens: row \d+",
    "skip-wait": r"data race\].*reads window",
    "no-credit": r"data race\].*no credit",
    "no-grid-barrier": r"data race\] (update|dispatch)",
    "wait-unscheduled": r"block not resident\]",
    "gin-signal-first": r"data race\] hybrid_.*GIN.*no strong signal after the put|"
                        r"data race\] hybrid_.*\(rail\.h:\d+\) writes window.*raised before this write",
    "gin-weak": r"data race\] hybrid_.*reads window.*no strong signal after the put",
    "gin-wrong-tail": r"data race\] hybrid_.*reads window.*no strong signal after the put",
    "no-forward-fence": r"data race\] hybrid_dispatch.*reads window.*of rank \d+'s GIN",
    "gin-no-flush": r"data race\] hybrid_.*no flush of the put's context",
    "gin-slot-early": r"data race\] hybrid_.*\(rail\.h:\d+\) writes window",
}
# Faults of hybrid kernels need two domains, and rows so long that a channel has several chunks.
HYBRID = ["gin-signal-first", "gin-weak", "gin-wrong-tail", "no-forward-fence", "gin-slot-early", "gin-no-flush"]
# These are looked for in low latency, too.
LOW_LATENCY = {"gin-signal-first": "rank-major", "gin-weak": "expert-major-3d", "gin-wrong-tail": "rank-major", "gin-no-flush": "expert-major-3d"}
# These are looked for in a dispatch into the peers' outputs, too: what is raced for may be such an output.
WINDOW = {
    "flag-relaxed": r"data race\].*stored without release",
    "wait-read": r"data race\].*not complete \(wait_group without \.read\) before the flag's release",
    "skip-wait": r"data race\]",
    "no-credit": r"data race\]",
}


def run(bench, *more):
    done = subprocess.run([bench] + list(more), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, universal_newlines=True)
    return done.returncode, done.stdout


def check(bench, name, layout, *more):
    topology, hidden = ("2x2", "4096") if name in HYBRID else ("1x4", "512")
    code, text = run(bench, "--backend", "emu", "--topology", topology, "--tokens", "16", "--hidden", hidden, "--topk", "4",
                     "--experts", "16", "--layout", layout, "--seed", "1", "--schedules", "10", "--check",
                     "--bug", name, *more)
    print(text)
    if code != 1:
        return "%s, %s: exit status %d instead of 1" % (name, layout, code)
    cause = WINDOW[name] if more else CAUSES[name]
    if not re.search(cause, text):
        return "%s, %s: the message does not name the cause (%s)" % (name, layout, cause)
    return None


def main():
    args = argparse.ArgumentParser()
    args.add_argument("bench")
    args.add_argument("names", nargs="*")
    a = args.parse_args()
    wrong = []
    for name in a.names:
        wrong += [w for w in (check(a.bench, name, layout) for layout in ("flat", "expert-major")) if w]
        if name in LOW_LATENCY:
            wrong += [w for w in [check(a.bench, name, LOW_LATENCY[name])] if w]
        if name in WINDOW:
            wrong += [w for w in [check(a.bench, name, "flat", "--window-out", "--no-fused")] if w]
    if not a.names:
        known = set(run(a.bench, "--bug", "list")[1].split()) - {"none"}
        wrong = ["not in the table: " + n for n in known ^ set(CAUSES)]
    for w in wrong:
        print(w)
    return 1 if wrong else 0


sys.exit(main())
