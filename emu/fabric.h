// Communicators of one emulated fabric and the host's side of it: ranks, streams, windows, rendezvous, and the rule by
// which host threads lend themselves to the engine.
//
// The engine runs inside host calls that wait. It starts when every rank's host thread waits (or one has been away for
// a grace time), runs until nothing can run any more, and only then are the waits judged. So what the kernels do
// depends on the seed and on what each rank queued, not on how the host's threads were timed.
#pragma once
#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "backend.h"
#include "stream.h"

namespace emu {

extern epFailLineFn failLine; // the library's last error
ncclResult_t fail(ncclResult_t code, const char *format, ...) __attribute__((format(printf, 2, 3)));

using Clock_ = std::chrono::steady_clock;
using Lock = std::unique_lock<std::mutex>;
static const u64 MEETING_NS = 30000000000ull; // is waited for at most
// Takes the one lock that guards everything of every fabric, and the globals `cur` and `engine`. A running engine makes
// way for whoever asks.
Lock lockEmulator();

class Fabric;

// What an ncclComm_t of the emulated fabric points to.
struct Comm {
  std::shared_ptr<Fabric> fabric;
  int rank;
};

struct Window {
  std::vector<u8 *> base; // by rank
  std::vector<size_t> bytes;
  bool owned;            // the memory came with it
  u8 *signals = nullptr; // of its network, this rank's
  GinPort *gin = nullptr;
};

struct Rank {
  Comm *comm = nullptr;                         // NULL once destroyed
  std::vector<std::unique_ptr<Stream>> streams; // [0] is the default stream, [1] the one of synchronous copies
  std::vector<std::shared_ptr<StreamEvent>> events;
  std::vector<std::shared_ptr<Window>> windows;
  bool away = false;      // its host is not waited for
  KnownRef hostKnown;     // what this rank's host has synchronised with
  std::string broken;     // why every call fails now
  std::thread::id thread; // that called for this rank last
  Clock_::time_point calledAt;
};

class Fabric {
public:
  Fabric(int scaleOut, int scaleUp, const ncclEpEmuOptions_t &options);
  ~Fabric();

  const int scaleOut, scaleUp;
  const u32 numSms, bug;
  const bool noBulkCopies;
  std::vector<Rank> ranks;
  Engine engine;

  // Every call begins with enter(); it fails where the rank is broken. Calls that give something back begin with
  // touch().
  void touch(int rank);
  ncclResult_t enter(int rank, const char *call);
  ncclResult_t findStream(int rank, cudaStream_t handle, const char *call, Stream **out);
  void queue(int rank, Stream *s, StreamOp op);
  ncclResult_t synchronize(Lock &lock, int rank, Stream *s, const char *call);
  ncclResult_t synchronizeRank(Lock &lock, int rank, const char *call);
  // At once, outside all streams, ordered after what the rank's host has synchronised with.
  void copyNow(int rank, void *dst, const void *src, size_t bytes);
  void relax(Lock &lock, int rank, u64 deadlineNs);
  // Rendezvous of all ranks: each gives `bytes` and gets all of them. Ends when a rank cannot come any more, and in time.
  ncclResult_t exchange(Lock &lock, int rank, const char *call, const void *mine, void *all, size_t bytes,
                        u64 patienceNs = MEETING_NS);
  ncclResult_t createStream(int rank, Stream **out);
  ncclResult_t destroyStream(Lock &lock, int rank, Stream *s, const char *call);
  void stop(int rank, bool stopped, u64 after); // ncclEpEmuRankStop
  void leave(int rank);                         // the communicator is destroyed
  bool empty() const;
  bool reaches(int a, int b) const { return a / scaleUp == b / scaleUp; }

private:
  struct Meeting {
    std::string call;
    size_t bytes;
    std::vector<u8> data;
    std::vector<bool> here;
    int arrived = 0;
    bool done = false;
    std::string error;
  };
  enum class Kind { Stream, Meeting, Relax };
  struct Waiter {
    Kind kind;
    int rank;
    std::thread::id thread;
    Stream *stream = nullptr; // NULL: all streams of the rank
    Meeting *meeting = nullptr;
    u64 episode = 0;
    bool released = false;
  };

  // Blocks the calling thread until its waiter is released or the deadline passes; false in the latter case.
  bool wait(Lock &lock, Waiter &w, Clock_::time_point deadline);
  bool satisfied(const Waiter &w) const;
  bool settle();
  bool hostsAreWaiting(bool *someoneAway) const;
  void runToIdle(Lock &lock);
  void breakStuck();
  void endMeeting(const std::string &why);
  bool work() const;
  Clock_::time_point lastCallOfAway() const;

  std::condition_variable changed;
  std::vector<Waiter *> waiters;
  std::shared_ptr<Meeting> meeting;
  bool running = false, advanced = false;
  u64 episodes = 0, activity = 1, activityRun = 0;
  Clock_::time_point lastCall, idleSince;
};

} // namespace emu
