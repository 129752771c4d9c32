// Small things every part of the emulator uses: integer names, the seeded generator, and reference counts. Reference
// counts are plain integers because one process-wide lock guards all emulator state.
#pragma once
#include <cstddef>
#include <cstdint>
#include <utility>

namespace emu {

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;

// xorshift64: fast, and the same on every machine, so that a seed names a schedule.
class Rng {
public:
  explicit Rng(u64 seed) : state(seed * 0x9E3779B97F4A7C15ull + 0x1234567) {
    if (!state) state = 1;
    for (int i = 0; i < 8; i++) next();
  }
  u32 next() {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return u32(state >> 16);
  }
  u32 below(u32 n) { return u32((u64(next()) * n) >> 32); }
  bool oneIn(u32 n) { return below(n) == 0; }

private:
  u64 state;
};

// Counted pointer to an object with a mutable member `refs`.
template <class T> class Ref {
public:
  Ref() = default;
  Ref(T *p) : ptr(p) { take(); }
  Ref(const Ref &o) : ptr(o.ptr) { take(); }
  Ref(Ref &&o) noexcept : ptr(std::exchange(o.ptr, nullptr)) {}
  Ref &operator=(Ref o) noexcept {
    std::swap(ptr, o.ptr);
    return *this;
  }
  ~Ref() {
    if (ptr && --ptr->refs == 0) delete ptr;
  }
  T *get() const { return ptr; }
  T *operator->() const { return ptr; }
  T &operator*() const { return *ptr; }
  explicit operator bool() const { return ptr != nullptr; }
  bool operator==(const Ref &o) const { return ptr == o.ptr; }

private:
  void take() {
    if (ptr) ptr->refs++;
  }
  T *ptr = nullptr;
};

} // namespace emu
