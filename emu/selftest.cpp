// The emulator's own tests: correct kernels must be clean under many seeds, and every misuse must be reported, with the
// right cause. Then streams, events and host threads.
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "fabric.h"
#include "gin.h"
#include "selftest_kernels.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

extern "C" {
#include <cmocka.h> // last: its macros have common names
}

using namespace emu;

static const u32 WORDS = 8192;

static u32 seeds() {
  const char *s = getenv("NCCL_EP_EMU_TEST_SEEDS");
  return s && atoi(s) > 0 ? u32(atoi(s)) : 40;
}

// A fabric without host threads: queue, run, look.
struct Lab {
  Lab(u64 seed, u32 n, u32 resident = 8, bool weak = true) : engine({seed, n, resident, weak}), ranks(n), streams(n) {
    for (u32 r = 0; r < n; r++) {
      streams[r].rank = int(r);
      engine.addStream(&streams[r], KnownRef());
      mine.push_back(words("mine", r));
      out.push_back(words("out", r));
      ctr.push_back(words("ctr", r));
      fill(r, mine[r] + litmus::FLAG, 64);
      fill(r, ctr[r], WORDS);
    }
    for (u32 r = 0; r < n; r++) gin.push_back(openGin(r));
    run(); // the hosts meet before they launch
    for (Stream &s : streams) hostKnown = engine.joiner.join(hostKnown, s.known);
  }
  ~Lab() {
    engine.abandon();
    for (Stream &s : streams) engine.removeStream(&s);
  }
  u32 *words(const char *name, u32 r) {
    return reinterpret_cast<u32 *>(engine.memory.allocate(name, int(r), RegionKind::Device, WORDS * 4));
  }
  // Every rank is a domain; a window is the rank's `mine`, signals are there from its start.
  GinPort *openGin(u32 r) {
    while (signals.size() < ranks) {
      u32 i = u32(signals.size());
      signals.push_back(engine.memory.allocate("signals", int(i), RegionKind::Window, 64));
    }
    GinPort p;
    p.rank = int(r), p.contexts = 2, p.signals = 2, p.domain = r;
    for (u32 i = 0; i < ranks; i++) {
      p.window.push_back(reinterpret_cast<u8 *>(mine[i]));
      p.windowBytes.push_back(WORDS * 4);
      p.signal.push_back(signals[i]);
    }
    return engine.openGin(p);
  }
  void fill(u32 r, u32 *p, u32 n) {
    StreamOp op(StreamOp::Fill);
    op.dst = reinterpret_cast<u8 *>(p);
    op.bytes = n * 4;
    streams[r].ops.push_back(op);
  }
  void launch(Stream &s, std::function<void()> body, u32 blocks, u32 threads, bool together = true) {
    StreamOp op(StreamOp::Kernel);
    op.together = together;
    op.name = "litmus";
    op.body = std::move(body);
    op.blocks = blocks, op.threads = threads, op.sharedBytes = 4096;
    op.hostKnown = hostKnown;
    s.ops.push_back(op);
  }
  litmus::Args args(u32 r, u32 bug) {
    litmus::Args a{};
    a.rank = r, a.ranks = ranks, a.bug = bug;
    a.mine = mine[r], a.peer = mine[(r + 1) % ranks], a.out = out[r];
    for (u32 i = 0; i < ranks; i++) a.ctr[i] = ctr[i];
    a.gin.comm = reinterpret_cast<uintptr_t>(gin[r]);
    return a;
  }
  bool run() {
    engine.hostDidSomething();
    for (;;) {
      if (engine.run(1 << 20) == Engine::Outcome::Busy) continue;
      bool left = engine.anythingRunning();
      for (Stream &s : streams) left = left || !s.ops.empty();
      if (!left) return true;
      if (engine.liftLimits()) continue;
      engine.checkResidency();
      if (engine.advanceClock()) continue;
      engine.reportStuck();
      return false;
    }
  }
  bool reported(const char *text) { return strstr(engine.reports.text().c_str(), text) != nullptr; }

  Engine engine;
  u32 ranks;
  KnownRef hostKnown;
  std::vector<Stream> streams;
  std::vector<u32 *> mine, out, ctr;
  std::vector<u8 *> signals;
  std::vector<GinPort *> gin;
};

typedef void (*Kernel)(const litmus::Args &);
typedef bool (*Check)(Lab &lab, u32 rank);

static void launchAll(Lab &lab, Kernel k, u32 bug, u32 blocks, u32 threads, u64 timeoutNs = 0) {
  for (u32 r = 0; r < lab.ranks; r++) {
    litmus::Args a = lab.args(r, bug);
    a.timeoutNs = timeoutNs;
    lab.launch(
        lab.streams[r], [k, a] { k(a); }, blocks, threads);
  }
}

static void clean(Kernel k, u32 variant, u32 ranks, u32 blocks, u32 threads, Check check) {
  for (u32 seed = 1; seed <= seeds(); seed++) {
    Lab lab(seed, ranks);
    launchAll(lab, k, variant, blocks, threads);
    bool ended = lab.run();
    bool right = ended;
    for (u32 r = 0; r < ranks && right; r++) right = check(lab, r);
    if (!right || lab.engine.reports.count())
      fail_msg("variant %u seed %u: ended %d, right %d\n%s", variant, seed, ended, right,
               lab.engine.reports.text().c_str());
  }
}

// Reported under every seed where `always`, else under at least a third of them.
static void caught(Kernel k, u32 bug, const char *cause, u32 ranks, u32 blocks, u32 threads, bool always = true,
                   u32 resident = 8, u64 timeoutNs = 0) {
  u32 found = 0;
  for (u32 seed = 1; seed <= seeds(); seed++) {
    Lab lab(seed, ranks, resident);
    launchAll(lab, k, bug, blocks, threads, timeoutNs);
    lab.run();
    bool hit = lab.reported(cause);
    found += hit;
    if (always && !hit)
      fail_msg("bug %u seed %u: \"%s\" not among\n%s", bug, seed, cause, lab.engine.reports.text().c_str());
    if (getenv("NCCL_EP_EMU_TEST_PRINT") && seed == 1) printf("--- %u: %s\n", bug, lab.engine.reports.text().c_str());
  }
  if (found * 3 < seeds()) fail_msg("bug %u: \"%s\" found with %u of %u seeds", bug, cause, found, seeds());
}

static bool anything(Lab &, u32) { return true; }

static bool messageRight(Lab &lab, u32 r) {
  for (u32 i = 0; i < 64; i++)
    if (lab.out[r][i] != 100 * ((r + lab.ranks - 1) % lab.ranks) + i) return false;
  return true;
}
static bool bulkRight(Lab &lab, u32 r) {
  for (u32 i = 0; i < 32; i++)
    if (lab.out[r][i] != 100 * ((r + lab.ranks - 1) % lab.ranks) + i) return false;
  return true;
}
static bool gridRight(Lab &lab, u32 r) {
  for (u32 b = 0; b < 3; b++)
    for (u32 t = 0; t < 64; t++)
      if (lab.out[r][b * 64 + t] != 3000 + 3 * t) return false;
  return true;
}
static bool executionRight(Lab &lab, u32 r) {
  const u32 *o = lab.out[r];
  for (u32 t = 0; t < 128; t++) {
    u32 l = t & 31;
    if (o[t] != t / 32 * 528 + (l + 1) * (l + 2) / 2) return false;
  }
  for (u32 i = 0; i < 3; i++)
    for (u32 l = 0; l < 32; l++)
      if (o[256 + i * 32 + l] != i * 100 + 31 - l) return false;
  for (u32 l = 0; l < 32; l++)
    if (o[512 + l] != l * 3) return false;
  return true;
}
static bool executionLate(Lab &lab, u32 r) { return executionRight(lab, r) && lab.out[r][600] == 1; }

static void testMessage(void **) {
  clean(litmus::message, 0, 3, 1, 32, messageRight);
  clean(litmus::message, 4, 3, 1, 32, messageRight);
  caught(litmus::message, 1, "was stored without release", 2, 1, 32);
  caught(litmus::message, 2, "[data race]", 2, 1, 32);
  caught(litmus::message, 3, "[data race]", 2, 1, 32, false);
  caught(litmus::message, 5, "[data race]", 2, 1, 32, false);
  caught(litmus::message, 6, "[data race]", 2, 1, 32);
}

static void testBulk(void **) {
  clean(litmus::bulk, 0, 2, 1, 32, bulkRight);
  clean(litmus::bulk, 3, 2, 1, 32, bulkRight);
  caught(litmus::bulk, 1, "[missing proxy fence]", 2, 1, 32);
  caught(litmus::bulk, 2, "[missing proxy fence]", 2, 1, 32);
  caught(litmus::bulk, 4, "wait_group without .read", 2, 1, 32);
  caught(litmus::bulk, 5, "[data race]", 2, 1, 32);
  caught(litmus::bulk, 6, "no fence.proxy.async (global)", 2, 1, 32);
  caught(litmus::bulk, 7, "[shared memory race]", 2, 1, 32, false);
  caught(litmus::bulk, 8, "[shared memory race]", 2, 1, 32);
  caught(litmus::bulk, 9, "no fence.proxy.async (global)", 2, 1, 32);
  caught(litmus::bulk, 10, "shared memory reused while a bulk store", 2, 1, 32);
  caught(litmus::bulk, 11, "shared memory reused while a bulk store", 2, 1, 32);
  caught(litmus::bulk, 12, "[shared memory reused while a bulk copy still uses it]", 2, 1, 32, false);
  caught(litmus::bulk, 13, "[never-written read]", 2, 1, 32);
  caught(litmus::bulk, 14, "exits while its bulk store", 2, 1, 32);
}

static void testCredit(void **) {
  clean(litmus::credit, 0, 2, 1, 32, anything);
  caught(litmus::credit, 1, "no credit or barrier from the reader", 2, 1, 32, false);
  caught(litmus::credit, 2, "[data race]", 2, 1, 32);
  caught(litmus::credit, 3, "[never-written read]", 2, 1, 32);
  caught(litmus::credit, 4, "past the end of the region", 2, 1, 32);
}

static bool lookRight(Lab &lab, u32 r) {
  for (u32 i = 0; i < 32; i++)
    if (lab.out[r][i] != 7) return false;
  return true;
}
static void testLook(void **) {
  clean(litmus::look, 0, 2, 1, 64, lookRight);
  for (u32 bug = 1; bug <= 4; bug++) caught(litmus::look, bug, "[data race]", 2, 1, 64, false);
  caught(litmus::look, 4, "which may still be read by", 2, 1, 64, false);
}

static void testGrid(void **) {
  clean(litmus::grid, 0, 2, 3, 64, gridRight);
  caught(litmus::grid, 1, "[data race]", 1, 3, 64);
  caught(litmus::grid, 2, "[data race]", 1, 3, 64);
  caught(litmus::grid, 3, "[block not resident]", 1, 6, 64, true, 4);
  caught(litmus::grid, 3, "[block not resident]", 1, 6, 64, true, 4, 1000000);
  caught(litmus::grid, 3, "[deadlock]", 1, 6, 64, true, 4);
  u32 found = 0; // enough room, but the kernel may not count on it
  for (u32 seed = 1; seed <= seeds(); seed++) {
    Lab lab(seed, 1);
    litmus::Args a = lab.args(0, 0);
    lab.launch(
        lab.streams[0], [a] { litmus::grid(a); }, 3, 64, false);
    assert_true(lab.run() && gridRight(lab, 0));
    found += lab.reported("[block not resident]");
  }
  assert_true(found * 6 > seeds());
}

static bool networkRight(Lab &lab, u32 r) {
  for (u32 i = 0; i < 64; i++)
    if (lab.out[r][i] != 3000 + 100 * ((r + lab.ranks - 1) % lab.ranks) + i) return false;
  return true;
}

static void testNetwork(void **) {
  clean(litmus::network, 0, 3, 1, 32, networkRight);
  clean(litmus::network, 10, 2, 1, 32, networkRight);
  clean(litmus::network, 12, 3, 1, 32, networkRight);
  caught(litmus::network, 1, "no strong signal after the put", 2, 1, 32);
  caught(litmus::network, 2, "[data race]", 2, 1, 32);
  caught(litmus::network, 3, "no strong signal after the put", 2, 1, 32);
  caught(litmus::network, 4, "no flush of the put's context", 2, 1, 32);
  caught(litmus::network, 5, "[data race]", 2, 1, 32);
  caught(litmus::network, 6, "[data race]", 2, 1, 32);
  caught(litmus::network, 7, "[out of bounds]", 2, 1, 32);
  caught(litmus::network, 8, "[misuse]", 2, 1, 32);
  caught(litmus::network, 9, "[data race]", 2, 1, 32);
  caught(litmus::network, 11, "[out of bounds]", 2, 1, 32);
  caught(litmus::network, 13, "no strong signal after the put", 2, 1, 32);
}

static void testExecution(void **) {
  clean(litmus::execution, 0, 4, 1, 128, executionRight);
  clean(litmus::execution, 4, 4, 1, 128, executionLate);
  caught(litmus::execution, 1, "[shared memory race]", 2, 1, 128, false);
  caught(litmus::execution, 2, "[collective misuse]", 2, 1, 128);
  caught(litmus::execution, 3, "mbarrier shared+0x0: 1 arrivals", 2, 1, 128);
  caught(litmus::execution, 5, "[deadlock]", 2, 1, 128);
  caught(litmus::execution, 6, "disagree", 2, 1, 128);
  caught(litmus::execution, 7, "polling global memory ctr[rank", 2, 1, 128);
  caught(litmus::execution, 8, "before its grid_wait", 2, 1, 128);
}

// ---- streams and memory ---------------------------------------------------------------------------------------------

static void writeWords(u32 *p) { p::stg<u32>(p + p::tid(), p::tid() + 1); }
static void addWords(const u32 *in, u32 *out) { p::stg<u32>(out + p::tid(), p::ldg<u32>(in + p::tid()) + 1); }

// Two streams of one rank: the second kernel follows the first by an event, or not.
static void testStreams(void **) {
  u32 found = 0;
  for (u32 seed = 1; seed <= seeds(); seed++)
    for (bool withEvent : {true, false}) {
      Lab lab(seed, 1);
      Stream second;
      lab.engine.addStream(&second, KnownRef());
      u32 *a = lab.mine[0], *b = lab.out[0];
      StreamOp copy(StreamOp::Copy);
      u32 host[64];
      lab.launch(
          lab.streams[0], [a] { writeWords(a); }, 1, 64);
      lab.launch(
          lab.streams[0], [a, b] { addWords(a, b); }, 1, 64); // kernel boundary orders
      auto event = std::make_shared<StreamEvent>();
      if (withEvent) {
        StreamOp record(StreamOp::Record), wait(StreamOp::Wait);
        record.event = wait.event = event;
        record.record = wait.record = event->recordsQueued = 1;
        lab.streams[0].ops.push_back(record);
        second.ops.push_back(wait);
      }
      lab.launch(
          second, [a, b] { addWords(b, a + 128); }, 1, 64);
      copy.dst = reinterpret_cast<u8 *>(host), copy.src = reinterpret_cast<u8 *>(a + 128), copy.bytes = sizeof host;
      second.ops.push_back(copy);
      assert_true(lab.run());
      assert_true(second.ops.empty());
      if (withEvent) {
        if (lab.engine.reports.count()) fail_msg("seed %u: %s", seed, lab.engine.reports.text().c_str());
        for (u32 i = 0; i < 64; i++) assert_int_equal(host[i], i + 3);
      } else
        found += lab.engine.reports.count() != 0;
      lab.engine.removeStream(&second);
    }
  assert_true(found * 3 >= seeds());
}

static void testFreed(void **) {
  Lab lab(1, 1);
  u32 *a = lab.mine[0];
  lab.engine.memory.release(lab.engine.memory.regionAt(a));
  lab.launch(
      lab.streams[0], [a] { writeWords(a); }, 1, 32);
  lab.run();
  assert_true(lab.reported("[memory freed while used]"));
}

// A network goes with its window, once nothing that it sent is on its way.
static void testNetworkCloses(void **) {
  Lab lab(1, 2);
  assert_int_equal(lab.engine.countGin(), 2);
  lab.gin[0]->queues[1].used = 1;
  for (GinPort *port : lab.gin) lab.engine.closeGin(port);
  assert_int_equal(lab.engine.countGin(), 1);
  lab.gin[0]->queues[1].used = 0;
  lab.engine.closeGin(nullptr);
  assert_int_equal(lab.engine.countGin(), 0);
}

static void testNoWeakMemory(void **) {
  for (u32 seed = 1; seed <= seeds(); seed++) {
    Lab lab(seed, 2, 8, false);
    launchAll(lab, litmus::message, 1, 1, 32);
    assert_true(lab.run());
    assert_int_equal(lab.engine.reports.count(), 0);
  }
}

static void testSparse(void **) {
  Lab lab(1, 1);
  u8 *big = lab.engine.memory.allocate("big", 0, RegionKind::Device, size_t(24) << 30);
  if (!big) skip();
  u32 *far = reinterpret_cast<u32 *>(big + (size_t(20) << 30)), *out = lab.out[0];
  lab.launch(
      lab.streams[0], [far] { writeWords(far); }, 1, 32);
  lab.launch(
      lab.streams[0], [far, out] { addWords(far, out); }, 1, 32);
  assert_true(lab.run());
  assert_int_equal(lab.engine.reports.count(), 0);
  for (u32 i = 0; i < 32; i++) assert_int_equal(out[i], i + 2);
}

// ---- host threads ---------------------------------------------------------------------------------------------------

static ncclEpEmuOptions_t options(u64 seed) {
  ncclEpEmuOptions_t o{};
  o.size = sizeof o;
  o.seed = seed;
  o.num_sms = 4;
  return o;
}

// A thread a rank: gather, kernels that wait for each other, synchronise, again. Returns the number of switches.
static u64 threadsRun(u64 seed, u32 ranks, bool *right) {
  auto fabric = std::make_shared<Fabric>(1, int(ranks), options(seed));
  std::vector<Comm> comms;
  for (u32 r = 0; r < ranks; r++) comms.push_back({fabric, int(r)});
  for (u32 r = 0; r < ranks; r++) fabric->ranks[r].comm = &comms[r];
  std::vector<std::thread> threads;
  std::vector<int> ok(ranks, 0);
  for (u32 r = 0; r < ranks; r++)
    threads.emplace_back([&, r] {
      Lock lock = lockEmulator();
      Fabric &f = *fabric;
      u32 *mem[3];
      for (u32 *&m : mem)
        m = reinterpret_cast<u32 *>(f.engine.memory.allocate("m", int(r), RegionKind::Window, WORDS * 4));
      std::vector<u32 *> all(3 * ranks);
      int rank = int(r);
      bool good = f.exchange(lock, rank, "test", mem, all.data(), sizeof mem) == ncclSuccess;
      litmus::Args a{};
      a.rank = r, a.ranks = ranks;
      a.mine = mem[0], a.peer = all[3 * ((r + 1) % ranks)], a.out = mem[1];
      for (u32 i = 0; i < ranks; i++) a.ctr[i] = all[3 * i + 2];
      for (int round = 0; round < 3; round++) {
        Stream *s = nullptr;
        f.enter(rank, "test");
        f.findStream(rank, nullptr, "test", &s);
        for (Kernel k : {round == 0 ? Kernel(litmus::message) : Kernel(litmus::execution)}) {
          StreamOp op(StreamOp::Kernel);
          op.name = "litmus";
          op.body = [k, a] { k(a); };
          op.blocks = 1, op.threads = 128, op.sharedBytes = 4096;
          f.queue(rank, s, std::move(op));
        }
        lock.unlock(); // others may come in whatever order
        std::this_thread::sleep_for(std::chrono::microseconds((r * 7919 + unsigned(round) * 104729) % 500));
        lock.lock();
        good = good && f.synchronize(lock, rank, s, "test") == ncclSuccess;
      }
      ok[r] = good;
      f.leave(rank);
    });
  for (auto &t : threads) t.join();
  Lock lock = lockEmulator();
  *right = fabric->engine.reports.count() == 0;
  if (!*right) printf("%s", fabric->engine.reports.text().c_str());
  for (int x : ok) *right = *right && x;
  u64 n = fabric->engine.switches;
  fabric.reset();
  comms.clear();
  return n;
}

static void testThreads(void **) {
  for (u64 seed = 1; seed <= 5; seed++) {
    bool right;
    u64 first = threadsRun(seed, 4, &right);
    assert_true(right);
    for (int again = 0; again < 3; again++) {
      assert_true(threadsRun(seed, 4, &right) == first); // the schedule is the seed's, not the threads'
      assert_true(right);
    }
  }
}

// Rank 1 never calls: rank 0's kernel waits for it, without a timeout. Its synchronise must fail, not hang.
static void testMissingRank(void **) {
  auto fabric = std::make_shared<Fabric>(1, 2, options(3));
  Comm c[2] = {{fabric, 0}, {fabric, 1}};
  {
    Lock lock = lockEmulator();
    Fabric &f = *fabric;
    for (int r = 0; r < 2; r++) f.ranks[size_t(r)].comm = &c[r];
    litmus::Args a{};
    a.ranks = 2;
    auto mem = [&](int r) {
      return reinterpret_cast<u32 *>(f.engine.memory.allocate("m", r, RegionKind::Window, WORDS * 4));
    };
    a.mine = mem(0), a.peer = mem(1), a.out = mem(0);
    Stream *s = nullptr;
    f.enter(0, "test");
    f.findStream(0, nullptr, "test", &s);
    StreamOp op(StreamOp::Kernel);
    op.name = "litmus";
    op.body = [a] { litmus::message(a); };
    op.blocks = 1, op.threads = 32, op.sharedBytes = 64;
    f.queue(0, s, op);
    assert_int_equal(f.synchronize(lock, 0, s, "test"), ncclInternalError);
    assert_int_equal(f.enter(0, "test"), ncclInternalError);
    assert_int_equal(f.enter(1, "test"), ncclSuccess);
    assert_non_null(strstr(f.engine.reports.text().c_str(), "[deadlock]"));
    fabric.reset();
    c[0].fabric.reset();
    c[1].fabric.reset();
  }
}

// ---- numbers --------------------------------------------------------------------------------------------------------

static void testNumbers(void **) {
  for (u32 h = 0; h < 65536; h++) { // every half and bfloat survives the way there and back
    bool nan = (h & 0x7c00) == 0x7c00 && (h & 0x3ff);
    assert_int_equal(p::float_to_half(p::half_to_float(h)), nan ? 0x7fff : h);
    bool bnan = (h & 0x7f80) == 0x7f80 && (h & 0x7f);
    assert_int_equal(p::float_to_bf16(p::bf16_lo(h)), bnan ? 0x7fff : h);
  }
  Rng rng(7);
  for (int i = 0; i < 200000; i++) { // nearest, ties to even
    u32 h = rng.below(0x7bff);
    float a = p::half_to_float(h), b = p::half_to_float(h + 1), mid = a + (b - a) / 2;
    assert_int_equal(p::float_to_half(mid), h & 1 ? h + 1 : h);
    assert_int_equal(p::float_to_half(std::nextafter(mid, a)), h);
    assert_int_equal(p::float_to_half(std::nextafter(mid, b)), h + 1);
  }
  assert_int_equal(p::float_to_half(65519.0f), 0x7bff);
  assert_int_equal(p::float_to_half(65520.0f), 0x7c00);
}

int main() {
  const CMUnitTest tests[] = {
      cmocka_unit_test(testMessage), cmocka_unit_test(testBulk),          cmocka_unit_test(testCredit),
      cmocka_unit_test(testGrid),    cmocka_unit_test(testNetwork),       cmocka_unit_test(testExecution),
      cmocka_unit_test(testStreams), cmocka_unit_test(testFreed),         cmocka_unit_test(testNoWeakMemory),
      cmocka_unit_test(testSparse),  cmocka_unit_test(testThreads),       cmocka_unit_test(testMissingRank),
      cmocka_unit_test(testNumbers), cmocka_unit_test(testNetworkCloses), cmocka_unit_test(testLook),
  };
  return cmocka_run_group_tests_name("emu_prims", tests, nullptr, nullptr);
}
