#include "shadow.h"

#include <tuple>

namespace emulator {

std::vector<Range> Shadow::note(const AccessPointer& access, const VectorClock& known, const Conflict& conflict) {
  if (access->nbytes == 0) return {};
  const uintptr_t end = access->begin + access->nbytes;
  split(access->begin);
  split(end);
  std::vector<Range> reused;
  for (auto cell = cells_.lower_bound(access->begin); cell != cells_.end() && cell->first < end; ++cell) {
    if (cell->second.freed) reused.push_back({reinterpret_cast<void*>(cell->first), cell->second.end - cell->first});
  }
  if (access->touch == Touch::read) {
    read(access, known, conflict);
  } else {
    write(access, known, conflict);
  }
  return reused;
}

void Shadow::take_back(const AccessPointer& freed) {
  const uintptr_t end = freed->begin + freed->nbytes;
  split(freed->begin);
  split(end);
  for (auto cell = cells_.lower_bound(freed->begin); cell != cells_.end() && cell->first < end; ++cell) {
    cell->second.freed = freed;
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

void Shadow::read(const AccessPointer& access, const VectorClock& known, const Conflict& conflict) {
  const uintptr_t end = access->begin + access->nbytes;
  uintptr_t at = access->begin;
  for (auto cell = cells_.lower_bound(at); at < end; ++cell) {
    if (cell == cells_.end() || cell->first > at) {
      const uintptr_t gap_end = cell == cells_.end() ? end : std::min(end, cell->first);
      cell = cells_.emplace_hint(cell, at, Cell{gap_end, nullptr, {access}, nullptr});
    } else {
      auto [write, reads, freed] = std::tie(cell->second.write, cell->second.reads, cell->second.freed);
      if (write && !known.knows(write->moment)) conflict(*write, freed);
      // Who is ordered after this read is ordered after those that this one knows of.
      std::erase_if(reads, [&known](const AccessPointer& earlier) { return known.knows(earlier->moment); });
      reads.push_back(access);
      freed = nullptr;
    }
    at = cell->second.end;
  }
}

void Shadow::write(const AccessPointer& access, const VectorClock& known, const Conflict& conflict) {
  const uintptr_t end = access->begin + access->nbytes;
  const auto first = cells_.lower_bound(access->begin);
  const auto last = cells_.lower_bound(end);
  for (auto cell = first; cell != last; ++cell) {
    const auto& [_, write, reads, freed] = cell->second;
    if (write && !known.knows(write->moment)) conflict(*write, freed);
    for (const AccessPointer& earlier : reads) {
      if (!known.knows(earlier->moment)) conflict(*earlier, freed);
    }
  }
  cells_.erase(first, last);
  cells_.emplace_hint(last, access->begin, Cell{end, access, {}, nullptr});
}

}  // namespace emulator
