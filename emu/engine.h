// The emulated GPUs of one fabric: every CUDA thread is a fiber, and one seeded scheduler runs all fibers of all ranks
// under one clock. Nothing here knows communicators or host threads (fabric.h does); one process-wide lock guards it
// all.
//
//   streams (stream.h) --start--> Launch --admit (num_sms resident)--> Block --> Warp --> Fiber
//   a fiber's stores wait in its buffer until an event commits them; bulk copies are events too
#pragma once
#include <boost/context/detail/fcontext.hpp>
#include <deque>
#include <functional>
#include <memory>
#include <queue>
#include <string>
#include <vector>

#include "gin.h"
#include "memory.h"
#include "order.h"
#include "report.h"

namespace emu {

enum class State : u8 { Ready, Collective, Barrier, Mbarrier, Polling, BulkStores, GinRoom, GinFlush, Done };
enum class Collective : u8 { Shfl, Ballot, Match, SyncWarp };

class Engine;
struct Block;
struct Warp;
struct BulkCopy;
struct Stream;
struct Launch;

// A store that was issued and is not yet visible.
struct PendingStore {
  u8 *addr;
  u32 bytes, epoch;
  u8 inlineData[16];
  const u8 *data;
  Fiber *owner;
  BulkCopy *copy; // the bulk store it is a chunk of
  ReleaseRef release;
  bool done;
};

struct BulkCopy {
  bool load;
  Fiber *fiber;
  Block *block;
  u8 *global;
  u32 shared, bytes, mbar, group;
  u32 epoch; // of the store, on both of the thread's bulk slots
  u32 chunksLeft, events;
  enum { Issued, SourceRead, Complete } state;
  bool dead;
  std::vector<u8> data, staleWords;
};

struct PolledWord {
  const u8 *addr;
  u64 seen; // change count of the word, or its value where it is mapped memory
  u32 sync; // 0: mapped
  u64 read; // the same when the thread last read this very word
};

struct Fiber {
  boost::context::detail::fcontext_t context;
  Block *block;
  Warp *warp;
  u32 tid, lane;
  State state;
  // what it knows (order.h)
  ViewRef view;
  KnownRef known, fencedKnown;
  u32 epoch, sharedFenced, globalFenced; // own clock; own part that passed a fence
  bool viewSharedFenced, viewGlobalFenced;
  bool touchedGlobal;                      // a first grid_wait would come too late
  ReleaseRef fenceRelease;                 // given away by relaxed stores after a fence
  KnownRef relaxedSeen, relaxedSeenFenced; // gained at the next fence
  u32 anyEpoch, lookEpoch;                 // of its last loadAny; of what it did before its last look
  // stores and bulk stores
  std::vector<PendingStore *> pending;
  std::vector<BulkCopy *> bulk;
  u32 bulkGroup, bulkSlot, bulkIssued, bulkReadDone, bulkWriteDone;
  // what it waits for
  Collective collective;
  u32 mask;
  u32 waitOn;
  std::vector<PolledWord> polled;
  size_t parkedAt;
};

struct OpenCollective {
  u32 mask, arrived;
  Collective kind;
};
struct Warp {
  Block *block;
  u32 id, ready, exited;
  int position; // in the list of ready warps, -1 when not there
  bool starved;
  Fiber *fiber[32];
  u32 value[32], source[32], result[32]; // of the collective a lane is in
  std::vector<OpenCollective> open;
};
struct NamedBarrier {
  u32 arrived, expected;
  std::vector<Fiber *> in, waiters;
};
struct Mbarrier {
  u32 addr, count, pending, phase, slot;
  int bytes;
  u32 initThread, initEpoch;
  bool initFenced;
  ViewRef building, finished;
  KnownRef buildingKnown, buildingFenced, finishedKnown, finishedFenced;
  std::vector<Fiber *> waiters;
};
struct SharedWord {
  u16 writer, reader, bulkReader, added; // added: the last write was an addition
  u32 writeEpoch, readEpoch, bulkEpoch, old;
  Place writePlace, readPlace, bulkPlace, pad2;
};
static const u16 NOBODY = 0xffff;

struct Block {
  Launch *launch;
  int rank;
  u32 index, identity, threads, alive, slots;
  u32 base; // epochs up to here belong to earlier users of the identity
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  std::vector<u8> shared;
  std::vector<SharedWord> sharedShadow;
  std::vector<NamedBarrier> barriers;
  std::vector<Mbarrier> mbarriers;
  std::vector<u64> hasPending; // a bit a thread
  std::vector<BulkCopy *> copies;
  KnownRef exitKnown;
  std::vector<std::pair<u32, const u8 *>>
      relaxedFlags; // acquired though stored without release: (storer's identity, flag)
  char *stacks;
  size_t stackBytes;
};

struct Launch {
  Stream *stream;
  std::string name;
  std::function<void()> body;
  u32 blocks, threads, sharedBytes;
  u32 residentLimit = ~0u; // blocks at a time: other work may hold SMs
  u32 started = 0, finished = 0;
  std::string suspect; // set when it went on only because more blocks were admitted
  KnownRef initial, known;
  std::vector<Block *> live;
  std::vector<std::pair<u32, u32>> identities; // of blocks that ended, with their last epochs
};

// Who an identity is, for reports; kept after the block is gone.
struct Identity {
  bool used = false, stream = false, nic = false;
  int rank = 0;
  u32 index = 0, threads = 0, base = 0;
  std::string name;
  Block *live = nullptr;
  std::vector<u32> slotThread; // of the slots above `threads`: issuing thread, or ~0 for an mbarrier
};

// Remembers the verdict on the last stamp: neighbouring words usually have the same.
struct LastStamp {
  u32 actor = 0, epoch = 0;
  bool known = false, first = true;
  template <class F> bool check(u32 a, u32 e, F verdict) {
    if (first || a != actor || e != epoch) {
      actor = a, epoch = e, first = false;
      known = verdict();
    }
    return known;
  }
};

struct Event {
  u64 due, order;
  PendingStore *store;
  BulkCopy *copy;
  Stream *start;
  GinStep *gin;
  bool operator<(const Event &o) const { return due != o.due ? due > o.due : order > o.order; }
};

struct EngineOptions {
  u64 seed = 1;
  u32 ranks = 1, residentBlocks = 8;
  bool weakMemory = true;
};

class Engine {
public:
  explicit Engine(const EngineOptions &options);
  ~Engine();
  Engine(const Engine &) = delete;
  Engine &operator=(const Engine &) = delete;

  // ---- what the fabric calls
  enum class Outcome { Busy, Idle };
  Outcome run(u64 picks);  // until that many scheduling decisions were made, or nothing can run
  void hostDidSomething(); // new work was queued, or mapped memory may have changed
  bool anythingRunning() const { return liveLaunches != 0; }
  bool advanceClock(); // lets timed waits expire; false when that is of no use
  void reportStuck();
  void abandon();    // drops all launches
  bool liftLimits(); // admits the blocks that a launch's own limit keeps out; true when there were any
  void checkResidency();
  void addStream(Stream *s, const KnownRef &known);
  void removeStream(Stream *s);
  u32 allocIdentity(int rank, u32 index, u32 threads, const std::string &name, const KnownRef &known, bool stream);
  void freeIdentity(u32 id, u32 lastEpoch);
  void copyInStream(Stream *s, u8 *dst, const u8 *src, size_t bytes, int value, bool fill);
  GinPort *openGin(const GinPort &port);
  void closeGin(GinPort *port);
  size_t countGin() const { return ginPorts.size(); }
  void freeze(int rank, u64 after); // its threads run no more, once that many scheduling decisions were made
  void thaw(int rank);

  Memory memory;
  Reports reports;
  KnownJoiner joiner;
  u64 switches = 0, clockNs = 0, progress = 0, ginPuts = 0, ginPutBytes = 0, ginContextsUsed = 0;
  bool weak;

  // ---- what the primitives call
  void warpCollective(Collective kind, u32 mask, u32 value, u32 source, u32 *result);
  void barrier(u32 id, u32 count, bool wait);
  void mbarInit(u32 addr, u32 count);
  void mbarFenceInit();
  void mbarArrive(u32 addr, u32 bytes);
  void mbarWait(u32 addr, u32 parity);
  void sharedLoad(u32 addr, void *out, u32 bytes, Place place);
  void sharedStore(u32 addr, const void *data, u32 bytes, Place place);
  void sharedAdd(u32 addr, u32 value, Place place);
  void bulkLoad(u32 shared, const void *global, u32 bytes, u32 mbar, Place place);
  void bulkStore(void *global, u32 shared, u32 bytes, Place place);
  void bulkCommit();
  void bulkWait(u32 keep, bool sourceOnly);
  void fenceProxy(bool global);
  enum class Order { Weak, Relaxed, Release };
  void load(const void *addr, void *out, u32 bytes, Place place);
  void loadAny(const void *addr, void *out, u32 bytes, Place place); // of memory that may never have been written
  void store(void *addr, const void *data, u32 bytes, Order order, Place place);
  void confirm(const void *addr, u32 bytes, Place place); // what loadAny did not check
  u64 poll(const void *addr, u32 bytes, bool acquire, bool system, Place place);
  u32 look(const u32 *word, Place place);                  // a fence, then an acquire
  void pollWide(const void *addr, void *out, Place place); // 16 bytes at once, relaxed; waits on the first word
  u32 atomicUpdate(u32 *addr, bool compare, u32 expected, u32 operand, bool acquireRelease, bool system, Place place);
  void fence();
  u32 ginPut(GinPort *port, u32 context, u32 domain, u64 to, u64 from, u32 bytes, Place place);
  void ginPutSignal(GinPort *port, u32 context, u32 domain, u64 to, u64 from, u32 bytes, u32 signal, u64 add,
                    bool strong, Place place);
  void ginSignal(GinPort *port, u32 context, u32 domain, u32 signal, u64 add, bool strong, Place place);
  u64 ginRead(GinPort *port, u32 context, u32 signal, Place place);
  void ginFlush(GinPort *port, u32 context);
  void sleep();
  void gridWait();
  u64 clock();

private:
  // scheduler.cpp
  static void fiberMain(boost::context::detail::transfer_t t);
  bool nothingChanges() const;
  Fiber *pick();
  void switchAway();
  void block(State s);
  void wake(Fiber *f);
  void yield();
  void maybeYield(u32 oneIn) {
    if (rng.oneIn(oneIn)) yield();
  }
  void unready(Warp *w);
  bool frozen(const Warp *w) const;
  void exitThread();
  void fire(const Event &e);
  void at(u64 due, PendingStore *p, BulkCopy *c, Stream *s) { events.push({due, sequence++, p, c, s, nullptr}); }
  u64 later();
  void startHeads();
  void startLaunch(Stream *s);
  void admit();
  void startBlock(Launch *l);
  void retire(Block *b);
  void finishLaunch(Launch *l);
  Block *takeBlock(u32 threads);
  void wakeAllParked();
  void wakeChangedMapped();
  void streamStep(Stream *s);
  // weak_memory.cpp
  Region *regionFor(const void *addr, size_t bytes, u32 align, const char *what, Place place);
  bool checkRead(Region *r, const u8 *addr, u32 bytes, bool strong, bool system, Place place, u32 epoch = 0);
  void checkWrite(Region *r, u8 *addr, const void *data, u32 bytes, Actor actor, u32 epoch, u8 strength, Place place);
  void flushWord(Word *w, const u8 *addr);
  PendingStore *newStore();
  void addPending(Fiber *f, PendingStore *p);
  void commit(PendingStore *p);
  void writeBytes(u8 *addr, const u8 *data, u32 bytes, const ReleaseRef &release, Actor actor);
  void drain();
  ReleaseRef makeRelease(bool system);
  void acquire(const ReleaseRef &r, bool system);
  void park(Fiber *f);
  void unpark(Fiber *f);
  void reportRace(Region *r, const u8 *addr, Word *w, bool isWrite, bool againstReader, Place place);
  // shared_memory.cpp
  bool slotSeen(const Fiber *f, u32 slot, u32 epoch) const;
  bool slotFenced(const Fiber *f, u32 slot, u32 epoch) const;
  void checkSharedWrite(Fiber *f, u32 addr, u32 bytes, bool async, Place place);
  void finishBulkLoad(BulkCopy *c);
  void stepBulkStore(BulkCopy *c);
  void copyDone(BulkCopy *c);
  u32 newSlot(Block *b, u32 thread);
  // gin.cpp
  GinQueue *ginQueue(GinPort *port, u32 context, u32 domain, Place place);
  void ginEnter(GinQueue *q);
  void ginSignalAfter(GinQueue *q, u32 signal, u64 add, u32 first, u32 last, Place place);
  void ginSchedule(GinStep *step);
  void ginStep(GinStep *step);
  void ginSettled(GinQueue *q, GinPut *put);
  void ginDeliver(GinStep *signal);
  void ginForget();
  // collectives.cpp
  void join(Fiber **fs, u32 n);
  void absorbOwn(View &v, const Fiber *f);
  void barrierDone(NamedBarrier &b, Fiber *self);
  Mbarrier *mbarrier(Block *b, u32 addr);
  void mbarCheck(Block *b, Mbarrier *m);
  // reports
  bool ordered(const Fiber *f, Actor a, u32 epoch) const;
  bool fenced(const Fiber *f, Actor a, u32 epoch) const;
  bool note(Fault kind, u64 key) { return reports.note(kind, key); }
  void report(Fault kind, u64 key, const char *format, ...) __attribute__((format(printf, 4, 5)));
  std::string describe(Actor a, u32 epoch) const;
  std::string me(Place place) const;

  Rng rng;
  u32 residentLimit;
  u64 now = 1, sequence = 0, picksLeft = 0, lastChange = 1, changes = 0;
  u32 laneMode, delay, startDelay;
  std::vector<Warp *> ready;
  std::vector<u64> freezeAt; // by rank, of `now`
  Warp *lastWarp = nullptr;
  std::priority_queue<Event> events;
  std::vector<Fiber *> parked;
  std::vector<PendingStore *> storePool;
  std::vector<std::unique_ptr<GinPort>> ginPorts;
  std::vector<Block *> finishedBlocks, idleBlocks, liveBlocks;
  std::vector<Identity> identities;
  std::vector<std::vector<Stream *>> streams; // by rank
  std::vector<std::deque<Launch *>> waiting;  // by rank: launches with blocks to start
  std::vector<u32> resident;                  // by rank
  u32 liveLaunches = 0, liveFibers = 0;
  bool wantMain = false, scanStreams = true, hopeless = false;
  u32 sharedAccesses = 0;
  u32 idleRounds = 0, clockJumps = 0;
  u64 jumpNs = 0, clockReads = 0, clockReadsAtJump = 0, fruitlessJumps = 0;
  boost::context::detail::fcontext_t mainContext = nullptr;
  Fiber *from = nullptr;
  struct {
    ViewRef in, finished, result;
    bool sharedFenced = false, globalFenced = false;
  } memo; // lanes of a warp share a view: merge an mbarrier's once
};

// The running fiber and its engine: plain globals, because kernels' code must not cache a thread's address of them.
inline Fiber *cur = nullptr;
inline Engine *engine = nullptr;

} // namespace emu
