#include "shadow.h"

#include <tuple>

namespace emulator {

void Shadow::note(const AccessPointer& access, const Clock& known, const Conflict& conflict) {
  if (access->nbytes == 0) return;
  split(access->begin);
  split(access->begin + access->nbytes);
  if (access->touch == Touch::read) {
    read(access, known, conflict);
  } else {
    write(access, known, conflict);
  }
}

void Shadow::forget(uintptr_t begin, size_t nbytes) {
  split(begin);
  split(begin + nbytes);
  cells_.erase(cells_.lower_bound(begin), cells_.lower_bound(begin + nbytes));
}

// Makes `at` the border of two cells, where a cell reaches across it.
void Shadow::split(uintptr_t at) {
  auto next = cells_.upper_bound(at);
  if (next == cells_.begin()) return;
  auto& [begin, cell] = *std::prev(next);
  if (begin == at || cell.end <= at) return;
  Cell tail = cell;
  cell.end = at;
  cells_.emplace_hint(next, at, std::move(tail));
}

void Shadow::read(const AccessPointer& access, const Clock& known, const Conflict& conflict) {
  const uintptr_t end = access->begin + access->nbytes;
  uintptr_t at = access->begin;
  for (auto cell = cells_.lower_bound(at); at < end; ++cell) {
    if (cell == cells_.end() || cell->first > at) {
      const uintptr_t gap_end = cell == cells_.end() ? end : std::min(end, cell->first);
      cell = cells_.emplace_hint(cell, at, Cell{gap_end, nullptr, {access}});
    } else {
      auto [write, reads] = std::tie(cell->second.write, cell->second.reads);
      if (write && !known.knows(write->moment)) conflict(*write);
      // Who is ordered after this read is ordered after those that this one knows of.
      std::erase_if(reads, [&known](const AccessPointer& earlier) { return known.knows(earlier->moment); });
      reads.push_back(access);
    }
    at = cell->second.end;
  }
}

void Shadow::write(const AccessPointer& access, const Clock& known, const Conflict& conflict) {
  const uintptr_t end = access->begin + access->nbytes;
  const auto first = cells_.lower_bound(access->begin);
  const auto last = cells_.lower_bound(end);
  for (auto cell = first; cell != last; ++cell) {
    const auto [write, reads] = std::tie(cell->second.write, cell->second.reads);
    if (write && !known.knows(write->moment)) conflict(*write);
    for (const AccessPointer& earlier : reads) {
      if (!known.knows(earlier->moment)) conflict(*earlier);
    }
  }
  cells_.erase(first, last);
  cells_.emplace_hint(last, access->begin, Cell{end, access, {}});
}

}  // namespace emulator
