// The emulated address space: regions with names and owners, and behind every 4-byte word a shadow that says who wrote
// and read it last. Addresses are real host addresses inside one reserved range, never handed out twice.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "order.h"
#include "report.h"

namespace emu {

struct Fiber;

struct Word {
  Actor writer, reader;
  u32 writeEpoch, readEpoch;
  u32 old;  // value before the last committed write: what a racing load may still see
  u32 sync; // index of the SyncWord, 0 none
  Place writePlace, readPlace;
  u8 pending; // issued stores that are not committed
  u8 flags;
  u16 pad;
};
enum : u8 { W_VALID = 1, W_STRONG = 2, W_SYSTEM = 4, W_OLD_VALID = 8 };

// A word that strong operations touch: flags and counters.
struct SyncWord {
  u64 change = 0;       // commit that last changed it
  ReleaseRef release;   // what an acquire of its present value gives
  Actor unreleased = 0; // who stored the present value without release
  KnownRef looked;      // what was done before a look at it (Engine::look): before whatever follows a later store of it
  std::vector<Fiber *> waiting;
};

enum class RegionKind { Device, Window, Mapped };

struct Region {
  std::string name;
  int rank;
  RegionKind kind;
  u8 *base;
  size_t bytes, mapped;
  Word *shadow; // NULL for mapped memory: host writes to it are not seen, so nothing is checked
  bool bornValid, freed;
  // `n` bytes from p on lie inside. Nothing here is added, so nothing overflows.
  bool holds(const void *p, size_t n) const {
    size_t off = size_t(static_cast<const u8 *>(p) - base); // huge below the base
    return off <= bytes && n <= bytes - off;
  }
};

class Memory {
public:
  Memory();
  ~Memory();
  Memory(const Memory &) = delete;
  Memory &operator=(const Memory &) = delete;

  // NULL when the range or the machine's memory is exhausted. Device memory starts as poison, the others as zeros.
  u8 *allocate(const std::string &name, int rank, RegionKind kind, size_t bytes);
  void release(Region *region);
  // Region at the address or just before it, freed ones included; NULL where nothing ever was.
  Region *regionAt(const void *p) {
    size_t off = size_t(static_cast<const u8 *>(p) - arena);
    return off < reserved && pages[off >> 12] ? regions[pages[off >> 12]].get() : nullptr;
  }
  // The address is emulated memory's, whether or not anything was ever there.
  bool covers(const void *p) const { return size_t(static_cast<const u8 *>(p) - arena) < reserved; }
  static Word *wordAt(Region *r, const void *p) {
    return r->shadow + (size_t(static_cast<const u8 *>(p) - r->base) >> 2);
  }
  SyncWord &syncOf(Word *w) {
    if (!w->sync) {
      w->sync = u32(syncs.size());
      syncs.emplace_back(new SyncWord);
    }
    return *syncs[w->sync];
  }
  SyncWord &sync(u32 index) { return *syncs[index]; }
  std::string where(const void *p);

private:
  u8 *arena = nullptr;
  u32 *pages = nullptr; // region of each 4 KiB page
  size_t reserved = 0, used = 0;
  std::vector<std::unique_ptr<Region>> regions;
  std::vector<std::unique_ptr<SyncWord>> syncs;
};

} // namespace emu
