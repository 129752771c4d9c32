#!/usr/bin/env python3
"""Counts the tests of a finished `meson test` run, one by one: cmocka and unittest by their own totals, others as one each.
Prints `PASSED FAILED`, and appends the output of what failed to a log."""
import json
import re
import sys


def count(test):
    """Passed and failed tests of one meson test."""
    out = test.get("stdout", "") + "\n" + test.get("stderr", "")
    passed = sum(int(n) for n in re.findall(r"^\[ +PASSED +\] (\d+) test", out, re.M))
    failed = sum(int(n) for n in re.findall(r"^\[ +FAILED +\] (\d+) test", out, re.M))
    for n, end in re.findall(r"^Ran (\d+) tests? in .*\n\n(?:OK|FAILED)(.*)$", out, re.M):
        bad = sum(int(m) for m in re.findall(r"(?:failures|errors)=(\d+)", end))
        skipped = sum(int(m) for m in re.findall(r"skipped=(\d+)", end))
        passed, failed = passed + int(n) - bad - skipped, failed + bad
    if test["result"] in ("OK", "EXPECTEDFAIL"):
        return max(passed, 1), 0
    if test["result"] == "SKIP":
        return 0, 0
    return passed, max(failed, 1)


def main():
    passed = failed = 0
    with open(sys.argv[1]) as lines, open(sys.argv[2], "a") as log:
        for line in lines:
            test = json.loads(line)
            p, f = count(test)
            passed, failed = passed + p, failed + f
            if f:
                log.write("\n---- %s: %s\n" % (test["name"], test["result"]))
                log.write((test.get("stdout", "") + test.get("stderr", ""))[-4000:])
    print(passed, failed)


main()
