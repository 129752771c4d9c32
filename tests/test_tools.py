#!/usr/bin/env python3
"""What the tools refuse, and how: exit status, and one line on stderr that names the option, its value and what was
expected. Arguments: ep_bench, ep_demo, ep_precompile."""
import json
import os
import subprocess
import sys
import tempfile
import xml.dom.minidom

bench, demo, precompile = sys.argv[1:4]
folder = tempfile.mkdtemp(prefix='nccl_ep_tools.')
failed = 0


def run(want, words, *command, env=None):
    """Runs a command; want: exit statuses that are right; words: all of them stand in what it prints."""
    global failed
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120, text=True,
                          errors='replace', env=dict(os.environ, **(env or {})))
    missing = [w for w in words if w not in done.stdout]
    if done.returncode not in want or missing:
        failed += 1
        print('FAIL:', ' '.join(command), '\n  exit status', done.returncode, 'of', want, 'missing', missing, '\n ',
              done.stdout[-600:])


def file(name, text):
    path = os.path.join(folder, name)
    with open(path, 'wb') as f:
        f.write(text.encode('latin-1'))
    return path


small = [bench, '--backend', 'emu', '--topology', '1x2', '--tokens', '4', '--hidden', '64', '--topk', '2', '--experts',
         '8']


def refused(words, *options):
    run([1, 2, 64], words, *small, *options)


# Low latency and what it has no use for.
for layout in 'rank-major', 'expert-major-3d':
    for options in (['--scale-layout', 'column'], ['--no-zero-pad'], ['--align', '16'], ['--backward'], ['--max-recv', '64']):
        refused([options[0], 'low latency', 'expected'], '--check', '--layout', layout, *options)

# NVFP4 is of low latency's BF16.
refused(['--combine-quant nvfp4', 'low latency'], '--combine-quant', 'nvfp4', '--layout', 'flat')
refused(['--combine-quant nvfp4', 'expected --dtype bf16 or fp8'], '--combine-quant', 'nvfp4', '--layout', 'rank-major', '--dtype', 'fp16')
refused(['--combine-quant nvfp4', 'across scale-up domains'], '--combine-quant', 'nvfp4', '--layout', 'rank-major', '--topology', '2x2')
refused(['--hidden 24', 'multiple of 16'], '--combine-quant', 'nvfp4', '--layout', 'rank-major', '--hidden', '24')

# Rows that the library does not take are refused before anything runs.
for options in (['--hidden', '7'], ['--hidden', '32784'], ['--hidden', '8', '--dtype', 'fp8'], ['--hidden', '2', '--dtype', 'fp32']):
    refused(['--hidden', 'multiple of 16, at most 65536'], *options)
refused(['--sms foo', 'few or all'], '--sms', 'foo')

# Numbers.
for option, value, words in (
        ('--tokens', '99999999', ['99999999', 'at most 1048576']), ('--tokens', '4,,', ['4,,']), ('--tokens', '', []),
        ('--topk', '33', ['1 to 32']), ('--topk', '0', ['1 to 32']), ('--hidden', '64,,', ['64,,']),
        ('--hidden', '0', ['from 1']), ('--hidden', ' -1', ['from 1']), ('--seed', '99999999999999999999', ['from 0']),
        ('--schedules', '0', ['from 1']), ('--timeout-ms', '0', ['from 1']), ('--emu-sms', '1025', ['1 to 1024']),
        ('--minus-one', 'nan', ['0 to 1']), ('--minus-one', '', ['0 to 1'])):
    refused(['--' + option[2:], 'expected'] + words, option, value)

# What the emulated fabric has not.
refused(['--graph', 'no graphs', 'expected'], '--graph')

# The time of calls, and where it would be that of a wait.
run([0], ['host-prepare', 'host-update', 'host-dispatch', 'host-combine'], *small, '--host-time')
refused(['--host-time', 'eager', 'expected'], '--host-time', '--max-recv', '0')

# Who waited for whom, and the same as a timeline that other programs read.
base = os.path.join(folder, 'profile')
for layout in 'flat', 'rank-major':
    run([0], ['# profile:', 'advice: rank 1 was late by '], *small, '--layout', layout, '--profile=' + base, '--delay', '1:300')
    with open(base + '.json') as f:
        if not any(e['name'].startswith('dispatch') for e in json.load(f)['traceEvents']):
            failed += 1
            print('FAIL: no dispatch in', f.name)
    xml.dom.minidom.parse(base + '.svg')
refused(['--delay 1:300', '--profile'], '--delay', '1:300')
refused(['--delay 2:300', 'below 2'], '--delay', '2:300', '--profile')
refused(['--delay 1', 'RANK:US'], '--delay', '1', '--profile')
refused(['--profile', '--sm-curve'], '--profile', '--sm-curve', '2,4')

# A rank that stays away and comes back, in one domain and in several: who said what, and what was exact.
away = [bench, '--backend', 'emu', '--tokens', '4', '--hidden', '64', '--topk', '3', '--timeout-ms', '100']
for topology, rank, options in (('1x3', '0', ['--layout', 'flat']), ('1x4', '3', ['--layout', 'expert-major-3d', '--staged']),
                                ('2x2', '1', ['--layout', 'expert-major', '--no-fused']), ('3x2', '4', ['--layout', 'flat']),
                                ('2x2', '3', ['--layout', 'rank-major'])):
    named = ['timed out', 'waiting for rank %s' % rank, 'that rank is masked']
    run([0], ['rank %s stays away' % rank, '# with all: exact', '# without it: exact', '# with all again: exact'] + named, *away,
        '--topology', topology, '--mask-test', rank, *options)
# FP32 shows in which order the domains' sums are added: without the rank as of choices without it.
for layout in 'flat', 'expert-major', 'rank-major', 'expert-major-3d':
    run([0], ['# with all: exact', '# without it: exact', '# with all again: exact'], bench, '--backend', 'emu', '--topology', '3x2', '--layout', layout,
        '--mask-test', '2', '--dtype', 'fp32', '--hidden', '64', '--seed', '5', '--timeout-ms', '1000')
# Kernels that skip a wait keep no such promise.
run([1], ['FAIL'], *away, '--topology', '1x3', '--mask-test', '1', '--bug', 'skip-wait')
for words, options in ((['rank below 3'], ['1x3', '3']), (['at least 3'], ['1x2', '1']), (['0 to'], ['1x3', '-1']),
                       (['--max-recv'], ['1x3', '1', '--max-recv', '0']),
                       (['--timeout-ms 1', 'at least 50'], ['1x3', '1', '--timeout-ms', '1']),
                       (['a run of its own', '--graph'], ['1x3', '1', '--profile']),
                       (['a run of its own', '--backward'], ['1x3', '1', '--backward'])):
    run([1, 2, 64], ['--mask-test', 'expected'] + words, *away, '--topology', options[0], '--mask-test', *options[1:])
refused(['--model', '--mask-test'], '--model', 'x', '--mask-test', '0')

# Beside others, where there are no others; and over SMs. What cannot be measured is said, and reports are whole.
page, drawing, report = (os.path.join(folder, n) for n in ('c.html', 's.svg', 'c.json'))
run([0], ['flat:4', 'rank-major:8', 'nccl-all-to-all: not measured', 'link-sm-stores: not measured', 'clocks of rank 1: not'],
    *small, '--compare=flat:4,rank-major:8', '--iters', '3', '--check', '--json', report, '--plot', page)
with open(report) as f:
    rows = json.load(f)['results']
if [(r['case'], r['operation'], len(r['samples_us']), r['errors']) for r in rows] != [
        (c, o, 3, 0) for c in ('flat:4', 'rank-major:8') for o in ('dispatch', 'combine')] or not all(
            r['min_us'] <= r['p10_us'] <= r['median_us'] <= r['p90_us'] <= r['max_us'] for r in rows):
    failed += 1
    print('FAIL: --compare --json', rows)
run([0], ['dispatch', 'errors: 0'], *small, '--sm-curve', '1,2,8', '--check', '--plot', drawing)
points = xml.dom.minidom.parse(drawing).getElementsByTagName('polyline')
with open(page) as f:
    bars = f.read().count("class='o'")
if [len(p.getAttribute('points').split()) for p in points] != [3, 3] or bars != 4:
    failed += 1
    print('FAIL: --plot', points, bars)
for value in 'flat', 'flat:', ':4', 'flat:4,', 'round:4', 'flat:4,' * 8 + 'flat:4':
    refused(['--compare=' + value, 'expected'], '--compare=' + value)
refused(['--tokens x', 'expected'], '--compare=flat:x')
for option in ['--schedules', '2'], ['--profile-parts'], ['--host-time'], ['--sm-curve', '1']:
    refused(['--compare', 'expected'], '--compare', *option)
for value in '', '0', '1,,2', '2000', '1,' * 33:
    refused(['--sm-curve ' + value, 'expected'], '--sm-curve', value)
refused(['--sm-curve', 'expected'], '--sm-curve', '1', '--sms', '4')
run([1], ['NCCL_EP_NUM_SMS=4', 'expected'], *small, '--sm-curve', '1', env={'NCCL_EP_NUM_SMS': '4'})
refused(['--plot x.png', '.svg or .html'], '--plot', 'x.png')

# Routing files.
good = '0 7\n' * 8
run([0], [], *small, '--check', '--routing', file('good', '# ids\n' + good + '-1,\t-1\r\n'))
for name, text, words in (
        ('high', '0 7\n0 8\n' + good, [':2:', "'8'", '0 to 7']), ('low', '0 -2\n' + good, [':1:', "'-2'"]),
        ('big', '0 99999999999999999999\n', [':1:', "'99999999999999999999'"]), ('word', '1 xx\n', [':1:', "'xx'"]),
        ('mixed', '1 3x\n', [':1:', "'3x'"]), ('binary', '\x7f\x45\x01\xff\n', [':1:', 'expert id']),
        ('many', good + '1 2 3\n', [':9:', '3 expert ids', 'expected 2']), ('few', '1\n', [':1:', '1 expert ids']),
        ('short', '0 7\n' * 5, ['5 rows', 'rank 1']), ('empty', '', ['0 rows'])):
    path = file(name, text)
    refused([path] + words, '--routing', path)
refused([folder, 'directory'], '--routing', folder)
refused(['/nonexistent', 'No such file'], '--routing', '/nonexistent')

# A report that cannot be written is told before anything is measured.
for option, path in ('--json', folder), ('--json', '/nonexistent/x.json'), ('--plot', '/nonexistent/x.svg'):
    done = subprocess.run([*small, option, path], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode != 1 or path not in done.stderr or done.stdout:
        failed += 1
        print('FAIL:', option, path, done)

run([64], ['--tokens x', 'expected'], demo, '--tokens', 'x')
run([64], ['--backend gpu', 'expected'], demo, '--backend', 'gpu')
run([64], ['--hidden 64,,', 'expected'], precompile, '--hidden', '64,,')

run([64], ['--layout flat,round', 'expected'], precompile, '--layout', 'flat,round')

# Low latency's kernels, once and from the cache; without a compiler there is nothing to see.
ll = [precompile, '--arch', '80', '--ranks', '2', '--experts', '8', '--topk', '2', '--hidden', '64', '--layout',
      'rank-major,expert-major-3d', '--cache-dir', os.path.join(folder, 'kernels')]
if 'NVRTC not found' not in subprocess.run(ll, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True).stdout:
    run([0], ['ep_ll_update_kernel', 'ep_ll_dispatch_kernel', 'ep_ll_combine_kernel', 'expert-major-3d',
              '6 kernels: 0 compiled, 6 found'], *ll)
    run([0], ['6 kernels: 2 compiled, 4 found'], *ll, '--combine-quant', 'nvfp4')
    run([1], ['not in /proc/x', 'cannot write'], *ll[:-1], '/proc/x')
    # Without partial sums the combine is another kernel.
    ht = ll[:-3] + ['expert-major'] + ll[-2:]
    run([0], ['3 kernels: 3 compiled'], *ht)
    run([0], ['3 kernels: 1 compiled, 2 found'], *ht, '--single-reduction')
    # Into window-backed outputs (where there are bulk copies) the dispatch is another kernel.
    flat = ['90' if word == '80' else 'flat' if word == 'expert-major' else word for word in ht]
    run([0], ['3 kernels: 3 compiled'], *flat)
    run([0], ['3 kernels: 1 compiled, 2 found'], *flat, '--window-out')
run([1], ['ep_precompile: ', '6 bytes', 'multiple of 4'], *ll, '--scale-bytes', '6', env={'NCCL_EP_DEBUG': 'NONE'})

# What no layout asked for has.
for option in '--backward', '--single-reduction':
    run([2], [option, 'flat or expert-major'], precompile, '--layout', 'rank-major', option)
run([2], ['--combine-quant nvfp4', 'rank-major or expert-major-3d'], precompile, '--combine-quant', 'nvfp4')

# Its errors do not depend on the library's log.
quiet = {'NCCL_EP_DEBUG': 'NONE'}
run([1], ['ep_precompile: '], precompile, '--hidden', '1000000', '--cache-dir', folder, env=quiet)
run([1], ['ep_precompile: '], *ll[:-3], 'rank-major', '--cache-dir', file('no_folder', ''), env=quiet)

sys.exit(1 if failed else 0)
