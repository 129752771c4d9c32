#!/usr/bin/env python3
"""Writes the manual pages (section 3) of the public functions from the headers' comments: one page a function, with the structs and
enumerations it takes. A parameter or member that neither its comment nor the table below explains is an error. Arguments: the output folder,
nccl_ep.h (which has the conventions of all calls), other headers."""
import os
import re
import sys

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import header as headers  # noqa: E402

# What these names mean wherever a comment has nothing more to say of them.
COMMON = {
    'handle': 'a handle of a group that exists',
    'ep_group': 'a group that is not destroyed',
    'group': 'a group that is not destroyed',
    'stream': 'the CUDA stream that the work is queued on; NULL: the default stream',
    'comm': 'a communicator of the emulated fabric',
    'tensor': 'a descriptor from ncclEpTensorAlloc',
    'config': 'NULL: defaults',
}
ERROR = re.compile(r'nccl(InvalidArgument|InvalidUsage|SystemError|InternalError|RemoteError)\b')
LOCALITY = re.compile(r'(Local|Collective)\b')


def escape(text):
    text = text.replace('"Collective" above', '"Collective" under THREADS').replace('under "Collective"', 'below')
    text = text.replace('\\', '\\e')
    text = re.sub(r'(?<!\w)-(?=\d)', r'\\-', text)
    return re.sub(r"^(?=[.'])", r'\\&', text)


def sentences(text):
    return re.split(r'(?<=[.])\s+(?=[A-Z]|ncclEp|ncclInvalid|ncclSystem|ncclInternal|ncclRemote)', text)


def blocks(function):
    """The comment as ('text', paragraph) and ('item', name, text), without the names it opens with."""
    found, depth = [], 0
    lines = list(function.comment)
    joined = ' '.join(lines[:2])
    if not lines[0].startswith(function.shared[0] + ', ') or ': ' in lines[0]:
        lines[0] = lines[0].split(': ', 1)[1]
    else:
        lines[0:2] = [joined.split(': ', 1)[1]]
    for line in lines:
        indent = len(line) - len(line.lstrip())
        item = re.match(r'\s+(\S.*?)\s{2,}(\S.*)', line)
        if not line.strip():
            found.append(('gap',))
        elif indent == 0:
            if found and found[-1][0] == 'text':
                found[-1] = ('text', found[-1][1] + ' ' + line.strip())
            else:
                found.append(('text', line.strip()))
        elif item and (not depth or indent == depth):
            depth = indent
            found.append(('item', item[1], item[2]))
        elif found and found[-1][0] == 'item':
            found[-1] = ('item', found[-1][1], found[-1][2] + ' ' + line.strip())
        else:
            raise headers.HeaderError(f'{function.name}: cannot read "{line}" of its comment')
    return [b for b in found if b[0] != 'gap']


def named_types(function, types):
    """Types that the parameters name, and those that these types' fields name; the tensor has a page of its own."""
    found = []

    def add(text):
        for name in re.findall(r'ncclEp\w+_t', text):
            if name in types and name not in found and (name != 'ncclEpTensor_t' or function.name == 'ncclEpTensorAlloc'):
                found.append(name)
                for member in types[name].members:
                    add(member.declaration)

    for declaration, _ in function.parameters:
        add(declaration)
    return found


def page(function, functions, types, conventions, siblings):
    text, items, seen = [], {}, {'ncclEpGetLastErrorString'}
    for block in blocks(function):
        if block[0] == 'item' and block[1] in siblings:
            items[block[1]] = block[2]
        elif block[0] == 'item' and re.fullmatch(r'[a-z][a-z_]*', block[1]):
            raise headers.HeaderError(f'{function.name}: its comment explains "{block[1]}", which is no parameter')
        else:
            text.append(block)
    summary, errors, locality = '', [], []
    body = []
    for block in text:
        if block[0] == 'item':
            body += ['.TP', '.I ' + escape(block[1]), escape(block[2])]
            continue
        kept = []
        for sentence in sentences(block[1]):
            if not summary:
                summary = sentence.rstrip('.')
            if ERROR.match(sentence):
                errors.append(sentence)
            elif LOCALITY.match(sentence):
                locality.append(sentence)
            else:
                kept.append(sentence)
        if kept:
            kept[0] = kept[0][0].upper() + kept[0][1:] if not kept[0].startswith('nccl') else kept[0]
            body += ['.PP', escape(' '.join(kept))]
    out = [f'.\\" Written from {function.header} by docs/man/generate.py.',
           f'.TH {function.name} 3 "" "libnccl_ep" "NCCL EP"', '.nh', '.ad l', '.SH NAME',
           f'{function.name} \\- {escape(re.split(r"[;:] ", summary)[0])}', '.SH SYNOPSIS', '.nf', f'.B #include <{function.header}>', '.sp']
    result = function.result + ('' if function.result.endswith('*') else ' ')
    declarations = [d for d, _ in function.parameters] or ['void']
    for i, declaration in enumerate(declarations):
        start = f'{result}{function.name}(' if i == 0 else '    '
        out.append(f'.B "{start}{declaration}{"," if i + 1 < len(declarations) else ");"}"')
    out += ['.fi', '.SH DESCRIPTION', *body[1 if body and body[0] == '.PP' else 0:]]
    if function.parameters:
        out.append('.SH PARAMETERS')
    for declaration, name in function.parameters:
        meaning = items.get(name) or COMMON.get(name)
        if not meaning:
            raise headers.HeaderError(f'{function.name}: nothing explains its parameter {name}')
        out += ['.TP', f'.I {name}', escape(meaning)]
    for name in named_types(function, types):
        t = types[name]
        out += [f'.SH {t.kind.upper()} {name}']
        if t.comment and not t.comment.startswith('----'):
            out.append(escape(t.comment))
        for member in t.members:
            if t.kind == 'struct' and member.name in ('size', 'magic'):
                meaning = 'filled by the _INIT macro'
            else:
                meaning = member.comment or ('reserved' if member.name.startswith('padding') else '')
            if not meaning:
                raise headers.HeaderError(f'{name}: nothing explains {member.name}')
            out += ['.TP', f'.B {member.declaration}', escape(meaning)]
    out.append('.SH RETURN VALUE')
    if function.result == 'ncclResult_t':
        out.append(escape(conventions['Result']))
        if errors:
            out += ['.PP', escape(' '.join(errors))]
    else:
        out.append('Text that ends with a zero byte; never NULL.')
    out.append('.SH THREADS')
    if locality:
        out += [escape(' '.join(locality)), '.PP']
    out.append(escape(conventions['Threads']))
    if any(s.startswith('Collective') for s in locality):
        out += ['.PP', escape(conventions['Collective'])]
    if any(n == 'stream' for _, n in function.parameters):
        out += ['.SH STREAMS', escape(conventions['Streams'])]
    whole = ' '.join(function.comment) + ' '.join(d for d, _ in function.parameters)
    for other in functions:
        if other != function.name and (re.search(r'\b' + other + r'\b', whole) or other in function.shared):
            seen.add(other)
    if 'ncclEpTensor_t' in whole or any('ncclEpTensor_t' in m.declaration for n in named_types(function, types) for m in types[n].members):
        seen.add('ncclEpTensorAlloc')
    seen.discard(function.name)
    out += ['.SH SEE ALSO', ',\n'.join(f'.BR {n} (3)' for n in sorted(seen))]
    return '\n'.join(out) + '\n'


def pages(paths):
    functions, types = headers.read(paths)
    conventions = headers.conventions(paths[0])
    result = {}
    for f in functions.values():
        siblings = {n for other in f.shared if other in functions for _, n in functions[other].parameters}
        result[f.name] = page(f, functions, types, conventions, siblings)
    return result


def main():
    try:
        written = pages(sys.argv[2:])
    except headers.HeaderError as error:
        sys.exit(f'generate.py: {error}')
    os.makedirs(sys.argv[1], exist_ok=True)
    for name, text in written.items():
        with open(os.path.join(sys.argv[1], name + '.3'), 'w', encoding='ascii') as file:
            file.write(text)


if __name__ == '__main__':
    main()
