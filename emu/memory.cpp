// Reserves, hands out and takes back emulated memory. Regions are a guard page apart and are never reused, so an access
// past an end or after a free finds no valid region.
#include "memory.h"

#include <cstdio>
#include <cstring>
#include <sys/mman.h>

namespace emu {

static const size_t PAGE = 4096;
static const size_t POISON_LIMIT = size_t(64)
                                   << 20; // larger regions stay sparse: only their shadow says "never written"

static void *reserve(size_t bytes, int protection) {
  void *p = mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return p == MAP_FAILED ? nullptr : p;
}

Memory::Memory() {
  regions.emplace_back();
  syncs.emplace_back();
  for (reserved = size_t(1) << 40; reserved >= size_t(1) << 30; reserved >>= 1) {
    arena = static_cast<u8 *>(reserve(reserved, PROT_NONE));
    if (!arena) continue;
    pages = static_cast<u32 *>(reserve(reserved / PAGE * sizeof(u32), PROT_READ | PROT_WRITE));
    if (pages) return;
    munmap(arena, reserved);
    arena = nullptr;
  }
  reserved = 0;
}

Memory::~Memory() {
  for (auto &r : regions)
    if (r && r->shadow) munmap(r->shadow, r->mapped / 4 * sizeof(Word));
  if (arena) munmap(arena, reserved);
  if (pages) munmap(pages, (arena ? reserved : 0) / PAGE * sizeof(u32));
}

u8 *Memory::allocate(const std::string &name, int rank, RegionKind kind, size_t bytes) {
  size_t size = (bytes + PAGE - 1) / PAGE * PAGE;
  if (!size) size = PAGE;
  if (size < bytes || size > reserved || used + size + PAGE > reserved) return nullptr;
  u8 *base = arena + used;
  if (mprotect(base, size, PROT_READ | PROT_WRITE)) return nullptr;
  std::unique_ptr<Region> r(
      new Region{name, rank, kind, base, bytes, size, nullptr, kind != RegionKind::Device, false});
  if (kind != RegionKind::Mapped) {
    r->shadow = static_cast<Word *>(reserve(size / 4 * sizeof(Word), PROT_READ | PROT_WRITE));
    if (!r->shadow) {
      mprotect(base, size, PROT_NONE);
      return nullptr;
    }
  }
  if (kind == RegionKind::Device && bytes <= POISON_LIMIT) memset(base, 0xA5, bytes);
  for (size_t p = used / PAGE; p <= (used + size) / PAGE; p++) pages[p] = u32(regions.size()); // the guard page too
  regions.push_back(std::move(r));
  used += size + PAGE;
  return base;
}

void Memory::release(Region *r) {
  r->freed = true;
  madvise(r->base, r->mapped, MADV_DONTNEED);
  mprotect(r->base, r->mapped, PROT_NONE);
  if (r->shadow) munmap(r->shadow, r->mapped / 4 * sizeof(Word));
  r->shadow = nullptr;
}

std::string Memory::where(const void *p) {
  Region *r = regionAt(p);
  char text[160];
  if (!r) {
    snprintf(text, sizeof text, "address %p outside all memory", p);
    return text;
  }
  snprintf(text, sizeof text, "%s[rank %d]+0x%zx%s", r->name.c_str(), r->rank,
           size_t(static_cast<const u8 *>(p) - r->base), r->freed ? " (freed)" : "");
  return text;
}

} // namespace emu
