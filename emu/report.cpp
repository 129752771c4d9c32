// Collects reports, dropping repetitions: a single missing fence would otherwise be reported for every row.
#include "report.h"

#include <cstring>
#include <vector>

namespace emu {

static const char *const faultNames[] = {"deadlock",
                                         "never-written read",
                                         "missing proxy fence",
                                         "shared memory race",
                                         "shared memory reused while a bulk copy still uses it",
                                         "data race",
                                         "collective misuse",
                                         "out of bounds",
                                         "memory freed while used",
                                         "block not resident",
                                         "misuse"};
static const u32 SHOWN_PER_KIND = 4;
static const size_t TEXT_LIMIT = 16384;

// Files are few; their index takes four bits of a Place, the line twelve.
static std::vector<const char *> &files() {
  static std::vector<const char *> names{""};
  return names;
}

Place placeOf(const char *file, u32 line) {
  std::vector<const char *> &f = files();
  size_t i = 0;
  while (i < f.size() && f[i] != file) i++;
  if (i == f.size()) {
    if (i == 16) return 0;
    f.push_back(file);
  }
  return Place(i << 12 | (line & 0xfff));
}

std::string placeText(Place place) {
  if (!place) return "";
  const char *name = files()[place >> 12];
  const char *slash = strrchr(name, '/');
  return std::string(" (") + (slash ? slash + 1 : name) + ":" + std::to_string(place & 0xfff) + ")";
}

bool Reports::note(Fault kind, u64 key) {
  total++;
  int k = int(kind);
  if (shown[k] >= SHOWN_PER_KIND || !known.insert({k, key}).second) return false;
  shown[k]++;
  return true;
}

void Reports::write(Fault kind, const std::string &line) {
  if (lines.size() < TEXT_LIMIT) lines += std::string("[") + faultNames[int(kind)] + "] " + line + "\n";
}

void Reports::addDetail(const std::string &line) {
  if (lines.size() < TEXT_LIMIT) lines += "  " + line + "\n";
}

void Reports::clear() {
  total = 0;
  known.clear();
  lines.clear();
  for (u32 &s : shown) s = 0;
}

} // namespace emu
