// What the checkers found, as text a person can act on: kind, who, where in the source, which memory. The first few of
// each kind are kept in words, all are counted.
#pragma once
#include <set>
#include <string>

#include "base.h"

namespace emu {

enum class Fault {
  Deadlock,
  NeverWritten,
  MissingFence,
  SharedRace,
  SharedReuse,
  Race,
  Collective,
  Bounds,
  Freed,
  NotResident,
  Misuse,
  Count
};

// A place in the kernels' source, packed so that it fits the shadow of a word.
using Place = u16;
Place placeOf(const char *file, u32 line);
std::string placeText(Place place);

class Reports {
public:
  // Counts a fault. `key` tells causes apart: true when this one is new and deserves words.
  bool note(Fault kind, u64 key);
  void write(Fault kind, const std::string &line);
  void addDetail(const std::string &line);
  u32 count() const { return total; }
  const std::string &text() const { return lines; }
  void clear();

private:
  u32 total = 0;
  u32 shown[int(Fault::Count)] = {};
  std::set<std::pair<int, u64>> known;
  std::string lines;
};

} // namespace emu
