"""Reads the public headers: functions with their comments, structs with their fields, enumerations with their values. The headers are
C of one style, so a few patterns are enough; what does not fit them is an error here, not a gap in the documentation."""
import collections
import re

Function = collections.namedtuple('Function', 'name result parameters comment shared header')  # parameters: (declaration, name)
Member = collections.namedtuple('Member', 'name declaration comment')
Type = collections.namedtuple('Type', 'name kind comment members header')  # kind: struct or enum


class HeaderError(Exception):
    pass


def comment_lines(text):
    """Lines of a comment without its frame; indentation stays."""
    lines = text[2:-2].split('\n')
    lines = [lines[0]] + [re.sub(r'^\s*\* ?', '', line) for line in lines[1:]]
    lines[0] = lines[0][1:] if lines[0].startswith(' ') else lines[0]
    return [line.rstrip() for line in lines]


def plain(comment):
    """A comment as one line of text."""
    return ' '.join(' '.join(re.sub(r'^\s*\* ?', '', line) for line in comment.strip()[2:-2].split('\n')).split())


def members(name, kind, body):
    """A comment belongs to the member whose line it ends, else to the next one."""
    found, pending, before, separator = [], '', [], ',' if kind == 'enum' else ';'

    def close():
        nonlocal pending, before
        text = ' '.join(pending.split())
        if text:
            if kind == 'enum':
                names = [(text.split('=')[0].strip(), text)]
            else:
                first = re.match(r'(.*?[\s*])(\w+(?:\[\w+\])?(?:\s*,\s*\w+)*)$', text)
                if not first:
                    raise HeaderError(f'{name}: cannot read "{text}"')
                names = [(re.sub(r'\[.*', '', n.strip()), (first[1] + n.strip()).strip()) for n in first[2].split(',')]
            found.extend([n, d, list(before)] for n, d in names)
            found[-1].append(len(names))
        pending, before = '', []

    for token in re.finditer(r'/\*.*?\*/|\n|[^/\n]+|/', body, re.S):
        text = token[0]
        if text.startswith('/*'):
            line = body[body.rfind('\n', 0, token.start()) + 1:token.start()]
            if line.strip() and (pending.strip() or found):
                if pending.strip():
                    before.append(plain(text))
                else:
                    group = next(f[3] for f in reversed(found) if len(f) > 3)
                    for f in found[len(found) - group:]:
                        f[2].append(plain(text))
            else:
                before.append(plain(text))
        elif text == '\n':
            pending += ' '
        else:
            parts = text.split(separator)
            for i, part in enumerate(parts):
                pending += part
                if i + 1 < len(parts):
                    close()
    close()
    return [Member(f[0], f[1], ' '.join(f[2])) for f in found]


def read(paths):
    """All functions and types of the headers, by name, in their order."""
    functions, types = {}, {}
    for path in paths:
        header = re.sub(r'.*/', '', str(path))
        with open(path, encoding='ascii') as file:
            text = file.read()
        # What is inside a C++ or preprocessor branch is not documented by itself.
        for m in re.finditer(r'(?:(/\*(?:(?!\*/).)*\*/)\n)?typedef (struct|enum)(?: \w+)? \{([^}]*?)\n?\} ?(ncclEp\w+);', text, re.S):
            types[m[4]] = Type(m[4], m[2], plain(m[1]) if m[1] else '', members(m[4], m[2], m[3]), header)
        declarations = list(re.finditer(r'^(ncclResult_t |const char \*)(ncclEp\w+)\(([^;{]*)\);', text, re.M))
        comment, last = None, None
        for m in declarations:
            between = text[last.end() if last else 0:m.start()]
            own = re.search(r'(/\*(?:(?!\*/).)*\*/)\n$', between, re.S)
            if own:
                comment = comment_lines(own[1])
            elif not last or between.strip():
                raise HeaderError(f'{header}: {m[2]} has no comment')
            opening = re.match(r'((?:ncclEp\w+, )*ncclEp\w+): ', ' '.join(comment[:2]))
            names = opening[1].split(', ') if opening else []
            if m[2] not in names:
                raise HeaderError(f'{header}: the comment before {m[2]} does not begin with "{m[2]}: "')
            parameters = []
            for p in ' '.join(m[3].split()).split(', '):
                if p != 'void':
                    parameters.append((p, re.search(r'(\w+)$', p)[1]))
            functions[m[2]] = Function(m[2], m[1].strip(), parameters, comment, names, header)
            last = m
    return functions, types


def conventions(path):
    """The paragraphs of the conventions of all calls, by their first word."""
    with open(path, encoding='ascii') as file:
        lines = comment_lines(re.search(r'/\*.*?\*/', file.read(), re.S)[0])
    start = next(i for i, line in enumerate(lines) if line.startswith('Conventions of all calls'))
    found, key = {}, None
    for line in lines[start + 1:]:
        first = re.match(r'  (\w+)(\s.*)', line)
        if first:
            key = first[1]
            found[key] = (key + first[2]) if re.match(r' \w', first[2]) else first[2].strip()
        elif key and line.strip():
            found[key] += ' ' + line.strip()
    return found
