#include "detector.h"

#include "stream_point.h"
#include "memory.h"
#include "poison.h"
#include "settings.h"
#include "simulation.h"
#include "text.h"

namespace emulator {
namespace {

constexpr size_t kHost = 0;
constexpr int kNoSite = 0;

const char* word(Touch touch) {
  switch (touch) {
    case Touch::read: return "read";
    case Touch::write: return "write";
    default: return "free";
  }
}

std::string json_of(const Access& access) {
  return "{\"operation\":" + quoted(access.operation) + ",\"stream\":" + std::to_string(access.stream) +
         ",\"touch\":\"" + word(access.touch) + "\",\"begin\":" + std::to_string(access.begin) +
         ",\"nbytes\":" + std::to_string(access.nbytes) + ",\"site\":" + std::to_string(access.site) +
         ",\"time\":" + std::to_string(access.time) + "}";
}

Nanoseconds host_time() { return Simulation::on() ? Simulation::get().at_last_call() : -1; }

}  // namespace

bool Detector::on() {
  static const bool on = settings().races;
  return on;
}

Detector& Detector::get() {
  static auto* detector = new Detector;  // never destroyed: see Streams
  return *detector;
}

Detector::Detector() : clocks_(1) {}

size_t Detector::enter() {
  std::lock_guard lock(mutex_);
  if (left_.empty()) {
    clocks_.emplace_back();
    return clocks_.size() - 1;
  }
  const size_t slot = left_.back();
  left_.pop_back();
  return slot;
}

void Detector::leave(size_t slot) {
  std::lock_guard lock(mutex_);
  left_.push_back(slot);
}

std::vector<Range> Detector::submitted(size_t slot, int stream, const Operation& operation, int site) {
  std::lock_guard lock(mutex_);
  VectorClock& clock = clocks_[slot];
  clock.join(clocks_[kHost]);
  if (operation.awaits) clock.join(operation.awaits->known());
  const Moment moment = clock.advance(slot);
  const Nanoseconds time = host_time();
  std::vector<Range> reused;
  const auto note_all = [&](const std::vector<Range>& ranges, Touch touch) {
    for (const Range& range : ranges) {
      const auto first_used =
          note({operation.name, stream, touch, address(range.begin), range.nbytes, site, moment, time}, clock);
      reused.insert(reused.end(), first_used.begin(), first_used.end());
    }
  };
  note_all(operation.reads, Touch::read);
  note_all(operation.writes, Touch::write);
  return reused;
}

VectorClock Detector::known_to(size_t slot) {
  std::lock_guard lock(mutex_);
  return clocks_[slot];
}

void Detector::host_waited(const VectorClock& known) {
  std::lock_guard lock(mutex_);
  clocks_[kHost].join(known);
}

void Detector::host_uses(const std::string& function, Range range, Touch touch, int site) {
  std::lock_guard lock(mutex_);
  VectorClock& clock = clocks_[kHost];
  const Moment moment = clock.advance(kHost);
  const auto reused = note({function, 0, touch, address(range.begin), range.nbytes, site, moment, host_time()}, clock);
  if (touch == Touch::free) return;
  for (const Range& each : reused) poison(const_cast<void*>(each.begin), each.nbytes);
}

void Detector::taken_back(int stream, Range range) {
  std::lock_guard lock(mutex_);
  shadow_.take_back(std::make_shared<const Access>(
      Access{"free", stream, Touch::free, address(range.begin), range.nbytes, kNoSite, Moment{}, host_time()}));
}

void Detector::given_back(const std::string& function, Range range) {
  host_uses(function, range, Touch::free, kNoSite);
  std::lock_guard lock(mutex_);
  shadow_.forget(address(range.begin), range.nbytes);
}

int Detector::site() {
  const auto ask = ask_.load();
  return ask == nullptr ? kNoSite : ask();
}

void host_uses_pinned(const char* function, Range range, bool writes) {
  if (!Detector::on() || Memory::get().place_of(range.begin) != Place::pinned) return;
  Detector& detector = Detector::get();
  detector.host_uses(function, range, writes ? Touch::write : Touch::read, detector.site());
}

std::vector<Range> Detector::note(const Access& access, const VectorClock& known) {
  return shadow_.note(std::make_shared<const Access>(access), known,
                      [&](const Access& earlier, const AccessPointer& freed) { found(earlier, access, freed); });
}

void Detector::found(const Access& first, const Access& second, const AccessPointer& freed) {
  const auto party = [](const Access& each) { return Party{each.operation, each.stream, each.touch, each.site}; };
  const auto [place, is_new] = known_races_.try_emplace({party(first), party(second)}, races_.size());
  if (is_new) {
    races_.push_back({first, second, freed, 1});
  } else {
    ++races_[place->second].count;
  }
}

std::string Detector::json() {
  std::lock_guard lock(mutex_);
  std::string text = "[";
  for (const Race& race : races_) {
    if (text.size() > 1) text += ",\n";
    text += "{\"first\":" + json_of(race.first) + ",\"second\":" + json_of(race.second) +
            ",\"freed\":" + (race.freed ? json_of(*race.freed) : "null") +
            ",\"count\":" + std::to_string(race.count) + "}";
  }
  return text + "]";
}

void Detector::clear() {
  std::lock_guard lock(mutex_);
  races_.clear();
  known_races_.clear();
}

}  // namespace emulator

using namespace emulator;

// For the Python package. `ask` returns a number for where the calling thread is; nullptr ends that.
ACL_EXPORT void ascend_emulator_ask_for_site(int (*ask)()) { Detector::get().ask_for_site(ask); }
ACL_EXPORT char* ascend_emulator_races() { return give(Detector::get().json()); }
ACL_EXPORT void ascend_emulator_clear_races() { Detector::get().clear(); }

ACL_EXPORT int ascend_emulator_watches_races() { return Detector::on(); }
ACL_EXPORT void ascend_emulator_host_access(const char* what, const void* begin, size_t nbytes, int writes) {
  host_uses_pinned(what, {begin, nbytes}, writes != 0);
}
