#!/usr/bin/env python3
"""ep_bench --model: predictions beside published and measured figures, counts of a batch small enough to count by hand, the
largest group in seconds, and refusals. Arguments: ep_bench, the folder of machines."""
import json
import os
import subprocess
import sys
import tempfile
import time

bench, models = sys.argv[1:3]
folder = tempfile.mkdtemp(prefix='nccl_ep_model.')
failed = 0


def check(good, text):
    global failed
    if not good:
        failed += 1
        print('FAIL:', text)


def file(name, text):
    path = os.path.join(folder, name)
    with open(path, 'w') as f:
        f.write(text)
    return path


def predict(machine, topology, *options):
    out = os.path.join(folder, 'out.json')
    path = machine if machine.startswith('/') else os.path.join(models, machine + '.json')
    done = subprocess.run([bench, '--backend', 'emu', '--model', path, '--topology', topology, '--json', out, *options],
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120)
    if done.returncode:
        print(done.stdout)
        sys.exit('FAIL: %s %s %s' % (machine, topology, options))
    with open(out) as f:
        return json.load(f), done.stdout


def near(name, got, want, share):
    print('%-46s predicted %7.1f, known %7.1f: %+.0f %%' % (name, got, want, 100 * (got / want - 1)))
    check(abs(got - want) <= share * want, '%s: not within %.0f %%' % (name, 100 * share))


# DeepEP's README, V2: 8K tokens, FP8 dispatch, BF16 combine, top-k 8 of 256, logical bandwidth with local traffic. (EP 8 on
# SM100 is NVLink's.) V1, H800, top-4 groups.
v2 = ['--layout', 'flat', '--tokens', '8192', '--dtype', 'fp8']
for topology, dispatch, combine in ('2x8', 90, 81), ('4x8', 61, 61):
    result, _ = predict('h100-8', topology, *v2)
    near('DeepEP V2 %s dispatch, GB/s' % topology, result['dispatch']['scale_out_gbs'], dispatch, 0.25)
    near('DeepEP V2 %s combine, GB/s' % topology, result['combine']['scale_out_gbs'], combine, 0.25)
    check(result['dispatch']['busiest'].startswith('NIC'), 'the NIC is the limit')
result, _ = predict('gb200-nvl72', '1x8', '--sms', '64', *v2)
near('DeepEP V2 SM100 8 ranks dispatch, GB/s', result['dispatch']['scale_up_gbs'], 726, 0.25)
near('DeepEP V2 SM100 8 ranks combine, GB/s', result['combine']['scale_up_gbs'], 740, 0.25)
check(result['sms'] == 64, '--sms is the limit')
result, _ = predict('h800-8', '4x8', '--layout', 'flat', '--tokens', '4096', '--dtype', 'fp8', '--routing', 'grouped')
near('DeepEP V1 H800 4x8 dispatch, GB/s', result['dispatch']['scale_out_gbs'], 58, 0.25)
near('DeepEP V1 H800 4x8 combine, GB/s', result['combine']['scale_out_gbs'], 57, 0.25)

# docs/performance.md: this library on two H200.
for tokens, layout, dispatch, combine in ('4096', 'flat', 203, 194), ('8192', 'flat', 372, 356):
    result, _ = predict('h200-2', '1x2', '--layout', layout, '--tokens', tokens)
    near('2 x H200, %s tokens dispatch, us' % tokens, result['dispatch']['us'] + result['update_us'], dispatch, 0.15)
    near('2 x H200, %s tokens combine, us' % tokens, result['combine']['us'], combine, 0.15)
    check(result['tokens_counted'] == 2 * int(tokens), 'all tokens are counted')

# One token, from rank 0 of 2 x 2, to experts of ranks 1 and 3 and twice of 2: near once, once over the NIC, once forwarded.
routing = file('routing', '1 3 2 -1\n' + '-1 -1 -1 -1\n' * 3)
result, _ = predict('h100-8', '2x2', '--layout', 'flat', '--tokens', '1', '--topk', '4', '--experts', '4', '--hidden', '64',
                    '--dtype', 'bf16', '--routing', routing)
row = result['dispatch_row_bytes']
check(row == 128 + 16 and result['combine_row_bytes'] == 128, 'a row has its weights: %d' % row)
for op, size, links in (
        ('dispatch', row, {'NIC out': (1, 0), 'NIC in': (1, 2), 'NVLink out': (1, 0), 'NVLink in': (1, 1), 'SM send': (2, 0)}),
        ('combine', 128, {'NIC out': (1, 2), 'NIC in': (1, 0), 'NVLink out': (1, 1), 'NVLink in': (1, 0)})):
    for link, (rows, rank) in links.items():
        got = result[op]['links'][link]
        check(got['bytes'] == rows * size and got['rank'] == rank, '%s %s: %s, not %d rows at rank %d' %
              (op, link, got, rows, rank))
check(result['dispatch']['us'] > 5 + 4 + 2 * 1.2, 'latencies count: %g us' % result['dispatch']['us'])

# A slower link never makes it faster, and the limit moves with it.
with open(os.path.join(models, 'h100-8.json')) as f:
    machine = json.load(f)
machine['nvlink']['gbs'] = 45
slow, _ = predict(file('slow.json', json.dumps(machine)), '2x8', *v2)
fast, _ = predict('h100-8', '2x8', *v2)
check(slow['dispatch']['us'] > 2 * fast['dispatch']['us'] and slow['dispatch']['busiest'].startswith('NVLink'),
      'NVLink of a tenth: %s' % slow['dispatch'])

start = time.time()
result, text = predict('h100-8', '256x8', *v2)
check(time.time() - start < 60, '2048 ranks take %.0f s' % (time.time() - start))
for words in 'predicted, not measured', 'no rank was run', 'Sampled', 'more than a GPU has', 'the library takes 1024':
    check(words in text, '%s: not in\n%s' % (words, text))

# ---- Refusals


def refused(words, *options):
    done = subprocess.run([bench, '--backend', 'emu', *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          timeout=120)
    missing = [w for w in words if w not in done.stdout]
    check(done.returncode in (1, 2, 64) and not missing, '%s: status %d, missing %s in %s' %
          (options, done.returncode, missing, done.stdout[-400:]))


good = os.path.join(models, 'h100-8.json')
refused(['at most 1024', '--model'], '--topology', '256x8')
refused(['2048'], '--topology', '257x8', '--model', good)
refused(['no NIC', '1xU'], '--topology', '2x2', '--model', os.path.join(models, 'h200-2.json'))
refused(['/none.json'], '--model', '/none.json')
refused(['line 1'], '--model', file('bad.json', '{"gpu": '))
for option in ['--check'], ['--backward'], ['--schedules', '2'], ['--compare'], ['--sm-curve', '8'], ['--window-out']:
    refused(['nothing is run', 'expected none of'], '--model', good, *option)
refused(['high throughput'], '--model', good, '--algo', 'll')
for part, key, value in (('nic', 'share', 2), ('nvlink', 'gbs', 'fast'), ('gpu', 'sms', None), ('hbm', 'share', 0)):
    with open(good) as f:
        machine = json.load(f)
    machine[part][key] = value
    if value is None:
        del machine[part][key]
    refused([part + '.' + key, 'expected a number'], '--model', file('wrong.json', json.dumps(machine)))
refused(['pci', 'not a part'], '--model', file('wrong.json', '{"pci": {}}'))
sys.exit(1 if failed else 0)
