#!/usr/bin/env python3
"""The documentation of the interface is complete: docs/compatibility.md has a row for every function, struct field and enumerator of the
public headers and none for what is not there, what it quotes the library can say, and every exported function has a manual page with its parameters that renders without
warnings. Arguments: the source folder, the folder of the manual pages. Prints one line a check in cmocka's style."""
import os
import re
import shutil
import subprocess
import sys

SOURCE, PAGES = sys.argv[1:3]
sys.dont_write_bytecode = True
sys.path.insert(0, os.path.join(SOURCE, 'docs', 'man'))
import header  # noqa: E402

HEADERS = [os.path.join(SOURCE, 'include', name) for name in ('nccl_ep.h', 'nccl_ep_ext.h')]
SECTIONS = ['NAME', 'SYNOPSIS', 'DESCRIPTION', 'RETURN VALUE', 'THREADS', 'SEE ALSO']
STATES = ('same', 'wider', 'refused', 'not yet', 'differs', 'ours')
failures = []


def check(name, problems):
    problems = list(problems)
    print(('[  FAILED  ] ' if problems else '[       OK ] ') + name)
    for problem in problems:
        print('    ' + problem)
    failures.extend(problems)


def rows(text):
    """Names in the first column of the tables, by the heading they stand under: (heading, name) -> state."""
    found, heading = {}, ''
    for line in text.split('\n'):
        if line.startswith('#'):
            heading = line.lstrip('# ').strip('`')
        elif line.startswith('| `'):
            cells = [c.strip() for c in line.strip('|').split('|')]
            for name in re.findall(r'`(\w+)`', cells[0]):
                found[heading, name] = cells[1] if len(cells) > 1 else ''
    return found


def page_problems(function):
    path = os.path.join(PAGES, function.name + '.3')
    if not os.path.exists(path):
        return [f'{function.name}: no manual page']
    with open(path, encoding='ascii') as file:
        text = file.read()
    sections = dict(re.findall(r'^\.SH ([^\n]*)\n(.*?)(?=^\.SH |\Z)', text, re.M | re.S))
    wanted = SECTIONS + (['PARAMETERS'] if function.parameters else [])
    problems = [f'{function.name}: its page lacks {s}' for s in wanted if not sections.get(s, '').strip()]
    told = re.findall(r'^\.TP\n\.I (\w+)\n\S', sections.get('PARAMETERS', ''), re.M)
    if told != [n for _, n in function.parameters]:
        problems.append(f'{function.name}: its page has the parameters {told}: expected {[n for _, n in function.parameters]}')
    for declaration, _ in function.parameters:
        if declaration not in sections.get('SYNOPSIS', ''):
            problems.append(f'{function.name}: its synopsis lacks "{declaration}"')
    return problems


def messages():
    """The library's string literals, adjacent ones joined, with every conversion as one %."""
    found = set()
    for folder in ('host', 'jit', 'plugin'):
        for name in sorted(os.listdir(os.path.join(SOURCE, folder))):
            if not name.endswith('.c'):
                continue
            with open(os.path.join(SOURCE, folder, name), encoding='utf-8') as file:
                text = re.sub(r'/\*.*?\*/', '', file.read(), flags=re.S)
            for run in re.findall(r'"(?:[^"\\]|\\.)*"(?:\s*"(?:[^"\\]|\\.)*")*', text):
                joined = ''.join(re.findall(r'"((?:[^"\\]|\\.)*)"', run))
                found.add(re.sub(r'%[#0-9.]*(?:ll|z|h)?[a-z]', '%', joined))
    return '\n'.join(found)


def quoted(text):
    """Lines of the library that the tables quote."""
    heading = ''
    for line in text.split('\n'):
        if line.startswith('#'):
            heading = line.strip('# ')
        elif line.startswith('|') and heading != 'Text and implementation':
            yield from re.findall(r'"([^"]+)"', line)


def pattern(quote):
    """A word of it may be what a conversion puts there; an ellipsis is anything."""
    words = [r'[^\n]*?'.join(f'(?:{re.escape(p)}|%[:,;)]?)' if p else '' for p in w.split('…')) for w in quote.split()]
    return re.compile(' '.join(words))


def missing_tests():
    """Tests that docs/cases.md names and nobody has: `test_name` function, function; ..."""
    with open(os.path.join(SOURCE, 'docs', 'cases.md'), encoding='utf-8') as file:
        text = file.read()
    for name, functions in re.findall(r'`(test_\w+)` (\w+(?:, \w+)*)', text):
        path = os.path.join(SOURCE, 'tests', name + '.c')
        held = open(path, encoding='utf-8').read() if os.path.exists(path) else ''
        yield from (f'{name} has no {f}' for f in functions.split(', ') if f'cmocka_unit_test({f})' not in held and f'static void {f}(' not in held)


functions, types = header.read(HEADERS)
with open(os.path.join(SOURCE, 'docs', 'compatibility.md'), encoding='utf-8') as file:
    document = file.read()
table, lines = rows(document), messages()
with open(os.path.join(SOURCE, 'plugin', 'nccl_ep.map'), encoding='ascii') as file:
    exported = set(re.findall(r'^\s*(ncclEp\w+);', file.read(), re.M))

wanted = {(t.name, m.name) for t in types.values() for m in t.members}
wanted_functions = set(functions)
function_rows = {key for key in table if key[0] in ('Functions', 'What is ours alone')}
listed_functions = {name for _, name in function_rows}
listed = {key for key in table if key[0] in types}
check('the headers were read', [] if len(functions) >= 18 and len(types) >= 21 and len(wanted) > 100 else ['too little was found in them'])
check('compatibility.md has every field and enumerator', (f'{t}: no row for {m}' for t, m in sorted(wanted - listed)))
check('compatibility.md has no field that is gone', (f'{t}: a row for {m}, which is not there' for t, m in sorted(listed - wanted)))
check('compatibility.md has every function', (f'no row for {n}' for n in sorted(wanted_functions - listed_functions)))
check('compatibility.md has no function that is gone', (f'a row for {n}' for n in sorted(listed_functions - wanted_functions)))
check('every row has a state', (f'{h}: {n}: "{state}" is none of {", ".join(STATES)}' for (h, n), state in table.items()
                                if (h, n) in wanted or (h, n) in function_rows
                                if state.split(',')[0].split(':')[0] not in STATES))
check('every line that compatibility.md quotes is in the library', (f'no source has "{q}"' for q in quoted(document)
                                                                         if not pattern(q).search(lines)))
check('cases.md names tests that are there', missing_tests())
check('exported and declared functions agree', (f'{n}: in one of map and headers only' for n in sorted(exported ^ wanted_functions)))
check('every function has a manual page', (p for f in functions.values() for p in page_problems(f)))
if shutil.which('groff'):
    pages = [os.path.join(PAGES, n + '.3') for n in sorted(functions) if os.path.exists(os.path.join(PAGES, n + '.3'))]
    done = subprocess.run(['groff', '-ww', '-man', '-Tascii', '-z', *pages], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    check('manual pages render without warnings', done.stdout.splitlines()[:10] + ([f'status {done.returncode}'] if done.returncode else []))
sys.exit(1 if failures else 0)
