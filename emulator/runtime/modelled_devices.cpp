#include "modelled_devices.h"

#include "stream_point.h"
#include "timeline.h"

#include <algorithm>
#include <cmath>

namespace emulator {
namespace {

// How long a link's use is remembered, in nanoseconds: long beside what one copy waits for another, short beside what
// a training does for long.
constexpr double kMemory = 1e8;
// A link that was used less than this is as good as idle: who has only copied a number does not count.
constexpr double kIdle = 1e-4;

// What happens if the host issues nothing after some task. Joint operations on which that task does not depend may end
// at any time, which nobody knows as yet: here they do not end.
class Foresight : public ModelledDevices {
 public:
  Foresight(const ModelledDevices& devices, const Task& task, JointOperations ending)
      : ModelledDevices(devices, task.number), number_(task.number), ending_(std::move(ending)) {}

  // When the task is the first of its lane, and has all it waits for; and how the lane's link was used by then.
  std::pair<Nanoseconds, LinkUse> arrival() {
    for (;; step()) {
      for (const auto& lane : busy()) {
        if (!lane->begun || lane->tasks.front()->number != number_) continue;
        return {lane->began, use_of(lane->device, lane->began)};
      }
    }
  }

 protected:
  void ended(const Lane&, const Task&) override {}
  void reached(StreamPoint& point) override { reached_.insert(&point); }
  bool is_reached(const StreamPoint& point) const override {
    return ModelledDevices::is_reached(point) || reached_.contains(&point);
  }
  std::optional<Nanoseconds> end_of(JointOperation& joint) override {
    return ending_.contains(&joint) ? joint.ends() : INT64_MAX;
  }

 private:
  const uint64_t number_;
  const JointOperations ending_;
  std::set<const StreamPoint*> reached_;
};

}  // namespace

ModelledDevices::ModelledDevices(const ModelledDevices& other, uint64_t last_number)
    : model_(other.model_), time_(other.time_), devices_(other.devices_), told_(other.told_) {
  std::map<Lane*, Lane*> copies{{nullptr, nullptr}};
  for (const auto& lane : other.busy_) {
    auto copy = std::make_shared<Lane>(*lane);
    const size_t begun = lane->begun ? 1 : 0;
    while (copy->tasks.size() > begun && copy->tasks.back()->number > last_number) copy->tasks.pop_back();
    copies[lane.get()] = copy.get();
    if (!copy->tasks.empty()) busy_.push_back(std::move(copy));
  }
  for (auto& [_, device] : devices_) {
    for (Engine* engine : {&device.compute, &device.h2d, &device.d2h}) {
      engine->serves = copies[engine->serves];
      auto waiting = std::exchange(engine->waiting, {});
      for (const auto& [late, ready, number, lane] : waiting) {
        engine->waiting.emplace(late, ready, number, copies[lane]);
      }
    }
  }
}

bool ModelledDevices::is_busy(int device) const {
  return std::any_of(busy_.begin(), busy_.end(), [device](const auto& lane) { return lane->device == device; });
}

void ModelledDevices::add(const std::shared_ptr<Lane>& lane, std::shared_ptr<const Task> task) {
  if (lane->tasks.empty()) busy_.push_back(lane);
  if (task->joint) unforeseen_.push_back(task);
  lane->tasks.push_back(std::move(task));
  begin_what_can();
}

bool ModelledDevices::cancel(Lane& lane) {
  Engine& drive = devices_[lane.device].compute;
  if (lane.tasks.empty() || drive.serves == &lane) return false;
  std::erase_if(drive.waiting, [&lane](const auto& waiting) { return std::get<Lane*>(waiting) == &lane; });
  lane.tasks.clear();
  std::erase_if(busy_, [&lane](const auto& busy) { return busy.get() == &lane; });
  return true;
}

void ModelledDevices::go_on(Nanoseconds until) {
  foresee();
  if (!unforeseen_.empty()) until = std::min(until, unforeseen_.front()->issued);
  for (Next coming = next(); coming.at <= until; coming = next()) {
    if (coming.lane != nullptr) return;
    let_happen(coming);
  }
  time_ = std::max(time_, until);
}

std::shared_ptr<JointOperation> ModelledDevices::step() {
  const auto unknown = foresee();
  return unknown ? unknown : let_happen(next());
}

std::shared_ptr<JointOperation> ModelledDevices::settle(Nanoseconds until) {
  if (const auto unknown = foresee()) return unknown;
  for (Next coming = next(); coming.at <= until; coming = next()) {
    if (const auto unknown = let_happen(coming)) return unknown;
  }
  time_ = std::max(time_, until);
  return nullptr;
}

// Of what happens at the same time, ends come first.
ModelledDevices::Next ModelledDevices::next() {
  Next found;
  for (auto& [_, device] : devices_) {
    for (Engine* engine : {&device.compute, &device.h2d, &device.d2h}) {
      if (engine->serves != nullptr && engine->ends < found.at) found = {.at = engine->ends, .engine = engine};
    }
  }
  for (const auto& lane : busy_) {
    const Task& first = *lane->tasks.front();
    if (!lane->begun || !first.joint) continue;
    const auto end = end_of(*first.joint);
    // What was issued since the arrival was foreseen may have held up the stream. It is the others' end all the same.
    const Nanoseconds at = std::max(lane->began, end ? *end : least_ends_.at(first.joint.get()));
    if (at < found.at) found = {.at = at, .lane = lane.get(), .unknown = end ? nullptr : first.joint};
  }
  for (const auto& lane : busy_) {
    const Nanoseconds issued = lane->tasks.front()->issued;
    if (!lane->begun && issued > time_ && issued < found.at) found = {.at = issued};
  }
  return found;
}

std::shared_ptr<JointOperation> ModelledDevices::let_happen(const Next& next) {
  if (next.unknown) return next.unknown;
  time_ = next.at;
  if (next.engine != nullptr) {
    if (is_link(next.engine->unit)) next.engine->note_use(time_);
    Lane& lane = *std::exchange(next.engine->serves, nullptr);
    end_first(lane);
    if (is_link(next.engine->unit)) share_link(devices_[lane.device]);
  } else if (next.lane != nullptr) {
    hear(next.lane->device, *next.lane->tasks.front()->joint);
    end_first(*next.lane);
  }
  begin_what_can();
  return nullptr;
}

void ModelledDevices::end_first(Lane& lane) {
  const auto task = std::move(lane.tasks.front());
  lane.tasks.pop_front();
  lane.begun = false;
  lane.ended = time_;
  least_ends_.erase(task->joint.get());
  ended(lane, *task);
  if (task->reaches) reached(*task->reaches);
}

void ModelledDevices::ended(const Lane& lane, const Task& task) {
  if (task.name.empty()) return;
  Timeline::get().add({task.name, lane.device, lane.stream, task.nbytes, lane.began, time_});
}

void ModelledDevices::reached(StreamPoint& point) { point.reach_at(time_); }

bool ModelledDevices::is_reached(const StreamPoint& point) const { return point.modelled().has_value(); }

// Tells the other ranks when this one's stream arrives, where that can be known by now. Returns what else must be.
std::shared_ptr<JointOperation> ModelledDevices::foresee() {
  std::shared_ptr<JointOperation> unknown;
  std::erase_if(unforeseen_, [&](const auto& task) {
    JointOperations needed = needed_by(*task);
    for (const auto& [_, each] : needed) {
      if (each->ends()) continue;
      unknown = each;
      return false;
    }
    const auto [arrival, link] = Foresight(*this, *task, std::move(needed)).arrival();
    const Nanoseconds lasts = model_.ring(*task->work);
    task->joint->arrives(arrival, lasts, link);
    least_ends_[task->joint.get()] = arrival + lasts;
    return true;
  });
  return unknown;
}

// The joint operations that must have ended before: those in front of it, in front of what these wait for, and so on.
ModelledDevices::JointOperations ModelledDevices::needed_by(const Task& joint) const {
  std::map<const StreamPoint*, std::pair<const Lane*, uint64_t>> places;
  std::vector<std::pair<const Lane*, uint64_t>> open;
  for (const auto& lane : busy_) {
    for (const auto& task : lane->tasks) {
      if (task->reaches) places[task->reaches.get()] = {lane.get(), task->number};
      if (task.get() == &joint) open.emplace_back(lane.get(), task->number);
    }
  }
  std::map<const Lane*, uint64_t> seen;
  JointOperations needed;
  while (!open.empty()) {
    const auto [lane, last] = open.back();
    open.pop_back();
    uint64_t& seen_to = seen[lane];
    for (const auto& task : lane->tasks) {
      if (task->number <= seen_to) continue;
      if (task->number > last) break;
      if (task->joint && task.get() != &joint) needed.emplace(task->joint.get(), task->joint);
      if (task->awaits && !is_reached(*task->awaits)) open.push_back(places.at(task->awaits.get()));
    }
    seen_to = std::max(seen_to, last);
  }
  return needed;
}

void ModelledDevices::begin_what_can() {
  // A point that is reached may let another lane go on, which may reach a point in turn.
  for (bool moved = true; moved;) {
    moved = false;
    for (const auto& lane : busy_) {
      while (!lane->begun && !lane->tasks.empty()) {
        const auto first = lane->tasks.front();
        if (first->issued > time_ || (first->awaits && !is_reached(*first->awaits))) break;
        moved = true;
        if (first->joint) {
          lane->begun = true;
          lane->began = time_;
        } else if (first->work) {
          lane->begun = true;
          const Unit unit = first->work->unit;
          devices_[lane->device].of(unit).waiting.emplace(unit == Unit::drive_write, time_, first->number, lane.get());
        } else {
          if (first->reaches) reached(*first->reaches);
          lane->tasks.pop_front();
        }
      }
    }
  }
  std::erase_if(busy_, [](const auto& lane) { return lane->tasks.empty(); });
  begin_on_engines();
}

void ModelledDevices::begin_on_engines() {
  for (auto& [_, device] : devices_) {
    for (Engine* engine : {&device.compute, &device.h2d, &device.d2h}) {
      if (engine->serves == nullptr && !engine->waiting.empty()) begin(device, *engine);
    }
  }
}

void ModelledDevices::begin(Device& device, Engine& engine) {
  if (is_link(engine.unit)) engine.note_use(time_);
  engine.serves = std::get<Lane*>(*engine.waiting.begin());
  engine.waiting.erase(engine.waiting.begin());
  engine.serves->began = time_;
  const Work& work = *engine.serves->tasks.front()->work;
  if (!is_link(engine.unit)) {
    engine.ends = time_ + (is_drive(engine.serves->device) ? model_.drive(work) : model_.kernel(work));
    return;
  }
  engine.since = time_ + model_.latency();
  engine.left = work.nbytes;
  engine.alone = model_.link_rate(work);
  engine.rate = 0;
  share_link(device);
}

// One direction has begun or ended, or other cards begin or cease to copy: both flow on, at the rates that they have
// now. Where all cards together ask the host's memory for more than it has, each gets the same part of what it asks.
void ModelledDevices::share_link(Device& device) {
  const bool both = device.h2d.serves != nullptr && device.d2h.serves != nullptr;
  double asked = 0;
  for (const Engine* engine : {&device.h2d, &device.d2h}) {
    const bool busy = engine->serves != nullptr;
    const double rate = busy ? engine->alone : model_.link_rate({.unit = engine->unit});
    asked += rate * (both ? model_.share_beside(engine->unit) : 1) * (busy ? 1 + engine->others : engine->instead);
  }
  const double memory = model_.host_memory();
  const double got = memory > 0 && asked > memory ? memory / asked : 1;
  for (Engine* engine : {&device.h2d, &device.d2h}) {
    if (engine->serves == nullptr) continue;
    if (time_ > engine->since) {
      engine->left = std::max(0.0, engine->left - engine->rate * (time_ - engine->since));
      engine->since = time_;
    }
    engine->rate = engine->alone * (both ? model_.share_beside(engine->unit) : 1) * got;
    engine->ends = engine->since + std::llround(engine->left / engine->rate);
  }
}

double ModelledDevices::Engine::use(Nanoseconds now) const {
  const double kept = std::exp(-(now - used_at) / kMemory);
  return serves != nullptr ? 1 - (1 - used) * kept : used * kept;
}

// Only when it begins or ceases to be used: so the figures do not depend on when somebody looks.
void ModelledDevices::Engine::note_use(Nanoseconds now) {
  used = use(now);
  used_at = now;
}

LinkUse ModelledDevices::use_of(int device, Nanoseconds now) {
  const Device& of = devices_[device];
  return {.device = device, .h2d = of.h2d.use(now), .d2h = of.d2h.use(now)};
}

// A joint operation ends, and tells what the links of all its ranks do. They are taken to begin together: while this
// one is busy, others that are used less are busy for a part of that time, and for the rest this one has gone on alone.
void ModelledDevices::hear(int device, JointOperation& joint) {
  for (const LinkUse& link : joint.links()) told_[link.device] = link;
  Device& here = devices_[device];
  const LinkUse& mine = told_[device];
  here.h2d.others = here.h2d.instead = here.d2h.others = here.d2h.instead = 0;
  const auto count = [](Engine& engine, double theirs, double mine) {
    engine.others += std::min(1.0, theirs / std::max(mine, kIdle));
    engine.instead += std::max(0.0, theirs - mine);
  };
  for (const auto& [number, link] : told_) {
    if (number == device) continue;
    count(here.h2d, link.h2d, mine.h2d);
    count(here.d2h, link.d2h, mine.d2h);
  }
  share_link(here);
}

}  // namespace emulator
