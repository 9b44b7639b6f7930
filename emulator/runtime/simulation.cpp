#include "simulation.h"

#include "mark.h"
#include "settings.h"
#include "timeline.h"

#include <time.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace emulator {
namespace {

constexpr Nanoseconds kNever = std::numeric_limits<Nanoseconds>::max();
constexpr int kDrive = -1;  // the drive counts as a device, whose engine it is

Nanoseconds cpu_time_of_thread() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return time.tv_sec * 1'000'000'000LL + time.tv_nsec;
}

}  // namespace

// One operation that has not ended.
struct Simulation::Task {
  uint64_t number;
  std::string name;  // empty: not for the timeline
  size_t nbytes;
  std::optional<Work> work;  // nothing for a mark or a wait for one
  std::shared_ptr<Mark> awaits;
  std::shared_ptr<Mark> reaches;
};

class Simulation::Lane {
 public:
  Lane(int device, int stream) : device(device), stream(stream) {}

  const int device;
  const int stream;
  std::deque<Task> tasks;
  bool at_engine = false;  // whether the first one waits for an engine, or is on it
  Nanoseconds began = 0;   // when an engine began and ended its last one
  Nanoseconds ended = 0;
};

struct Simulation::Engine {
  Unit unit;  // h2d, d2h, or any other for computing and for the drive
  // Writes to the drive come last; else by when it was ready, then in the order of issue.
  std::set<std::tuple<bool, Nanoseconds, uint64_t, Lane*>> waiting{};
  Lane* serves = nullptr;
  Nanoseconds ends = kNever;

  // Of a link: since when bytes flow at this rate, and how many were left then.
  Nanoseconds since = 0;
  double left = 0;
  double alone = 0;  // the rate that it would have
  double rate = 0;
};

struct Simulation::Device {
  Engine compute{.unit = Unit::vector};
  Engine h2d{.unit = Unit::h2d};
  Engine d2h{.unit = Unit::d2h};

  Engine& of(Unit unit) { return unit == Unit::h2d ? h2d : unit == Unit::d2h ? d2h : compute; }
};

// A call of the host: it costs what the model says, or what the host has computed since its last call if that counts
// and is more. Holds the lock.
class Simulation::Call {
 public:
  Call(Simulation& simulation, Nanoseconds cost)
      : lock_(simulation.mutex_), factor_(simulation.model_.host_cpu_factor()) {
    if (factor_ > 0 && left_at() >= 0) {
      cost = std::max<Nanoseconds>(cost, std::llround(factor_ * (cpu_time_of_thread() - left_at())));
    }
    simulation.host_ += cost;
    simulation.advance(simulation.host_);
  }

  ~Call() {
    if (factor_ > 0) left_at() = cpu_time_of_thread();
  }

  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

 private:
  static Nanoseconds& left_at() {
    thread_local Nanoseconds time = -1;  // no call yet
    return time;
  }

  std::lock_guard<std::mutex> lock_;
  const double factor_;
};

bool Simulation::on() {
  static const bool on = !settings().model.empty();
  return on;
}

Simulation& Simulation::get() {
  static auto* simulation = new Simulation;  // never destroyed: see Streams
  return *simulation;
}

Simulation::Simulation() : model_(settings().model) {}

std::shared_ptr<Simulation::Lane> Simulation::open(int device, int stream) {
  return std::make_shared<Lane>(device, stream);
}

void Simulation::issue(const std::shared_ptr<Lane>& lane, const Operation& operation) {
  const bool works = operation.body != nullptr;
  Call call(*this, !operation.own_call ? 0 : works ? model_.issue() : model_.event());
  issue_at_host_time(lane, {.number = 0,
                            .name = operation.name,
                            .nbytes = bytes_written(operation),
                            .work = works ? std::optional(operation.work) : std::nullopt,
                            .awaits = operation.awaits,
                            .reaches = operation.reaches});
}

void Simulation::run_now(int device, const Work& work, bool own_call) {
  Call call(*this, own_call ? model_.issue() : 0);
  const auto lane = open(device, 0);
  issue_at_host_time(lane, {.number = 0, .name = "", .nbytes = 0, .work = work, .awaits = nullptr, .reaches = nullptr});
  wait_until([&] { return lane->tasks.empty(); }, own_call ? model_.wait() : 0);
}

void Simulation::issue_at_host_time(const std::shared_ptr<Lane>& lane, Task task) {
  task.number = ++issued_;
  if (lane->tasks.empty()) busy_.push_back(lane);
  lane->tasks.push_back(std::move(task));
  begin_what_can();
}

void Simulation::wait_for(const Lane& lane) {
  Call call(*this, 0);
  wait_until([&] { return lane.tasks.empty(); }, model_.wait());
}

bool Simulation::wait_for(const Lane& lane, Nanoseconds at_most) {
  Call call(*this, 0);
  const Nanoseconds until = host_ + at_most;
  while (!lane.tasks.empty() && next_to_end()->ends <= until) step(*next_to_end());
  const bool ended = lane.tasks.empty();
  host_ = ended ? time_ + model_.wait() : until + model_.query();  // so that whoever keeps waiting gets there
  return ended;
}

void Simulation::wait_for(const Mark& mark) {
  Call call(*this, 0);
  wait_until([&] { return mark.modelled().has_value(); }, model_.wait());
}

void Simulation::wait_for_device(int device) {
  Call call(*this, 0);
  const auto of_device = [device](const auto& lane) { return lane->device == device; };
  wait_until([&] { return std::none_of(busy_.begin(), busy_.end(), of_device); }, model_.wait());
}

std::shared_ptr<Simulation::Lane> Simulation::use_drive(bool reads, size_t nbytes) {
  Call call(*this, 0);
  const auto lane = open(kDrive, 0);
  issue_at_host_time(lane, {.number = 0,
                            .name = reads ? "drive_read" : "drive_write",
                            .nbytes = nbytes,
                            .work = Work{.unit = reads ? Unit::drive_read : Unit::drive_write,
                                         .nbytes = static_cast<double>(nbytes)},
                            .awaits = nullptr,
                            .reaches = nullptr});
  return lane;
}

bool Simulation::cancel(Lane& lane) {
  Call call(*this, 0);
  Engine& drive = devices_[kDrive].compute;
  if (lane.tasks.empty() || drive.serves == &lane) return false;
  std::erase_if(drive.waiting, [&lane](const auto& waiting) { return std::get<Lane*>(waiting) == &lane; });
  lane.tasks.clear();
  std::erase_if(busy_, [&lane](const auto& busy) { return busy.get() == &lane; });
  return true;
}

std::pair<Nanoseconds, Nanoseconds> Simulation::times_of(const Lane& lane) {
  std::lock_guard lock(mutex_);
  return {lane.began, lane.ended};
}

template <class Done>
void Simulation::wait_until(Done done, Nanoseconds cost) {
  while (!done()) step(*next_to_end());
  host_ = time_ + cost;
}

bool Simulation::asked(const Lane& lane) {
  Call call(*this, model_.query());
  return lane.tasks.empty();
}

bool Simulation::asked(const Mark& mark) {
  Call call(*this, model_.query());
  return mark.modelled().has_value();
}

std::optional<Nanoseconds> Simulation::time_of(const Mark& mark) {
  Call call(*this, 0);
  return mark.modelled();
}

Nanoseconds Simulation::now() {
  Call call(*this, 0);
  return host_;
}

Nanoseconds Simulation::at_last_call() {
  std::lock_guard lock(mutex_);
  return host_;
}

void Simulation::advance(Nanoseconds until) {
  for (Engine* engine = next_to_end(); engine != nullptr && engine->ends <= until; engine = next_to_end()) {
    step(*engine);
  }
  time_ = until;
}

Simulation::Engine* Simulation::next_to_end() {
  Engine* next = nullptr;
  for (auto& [_, device] : devices_) {
    for (Engine* engine : {&device.compute, &device.h2d, &device.d2h}) {
      if (engine->serves != nullptr && (next == nullptr || engine->ends < next->ends)) next = engine;
    }
  }
  return next;
}

// What the engine does ends, and what has waited for that begins.
void Simulation::step(Engine& ending) {
  time_ = ending.ends;
  Lane& lane = *ending.serves;
  const Task task = std::move(lane.tasks.front());
  lane.tasks.pop_front();
  lane.at_engine = false;
  lane.ended = time_;
  ending.serves = nullptr;
  if (!task.name.empty()) Timeline::get().add({task.name, lane.device, lane.stream, task.nbytes, lane.began, time_});
  if (task.reaches) task.reaches->reach_at(time_);
  if (is_link(ending.unit)) share_link(devices_[lane.device]);
  begin_what_can();
}

void Simulation::begin_what_can() {
  // A mark that is reached may let another lane go on, which may reach a mark in turn.
  for (bool moved = true; moved;) {
    moved = false;
    for (const auto& lane : busy_) {
      while (!lane->at_engine && !lane->tasks.empty()) {
        const Task& first = lane->tasks.front();
        if (first.awaits && !first.awaits->modelled()) break;
        moved = true;
        if (first.work) {
          lane->at_engine = true;
          const Unit unit = first.work->unit;
          devices_[lane->device].of(unit).waiting.emplace(unit == Unit::drive_write, time_, first.number, lane.get());
        } else {
          if (first.reaches) first.reaches->reach_at(time_);
          lane->tasks.pop_front();
        }
      }
    }
  }
  std::erase_if(busy_, [](const auto& lane) { return lane->tasks.empty(); });
  begin_on_engines();
}

void Simulation::begin_on_engines() {
  for (auto& [_, device] : devices_) {
    for (Engine* engine : {&device.compute, &device.h2d, &device.d2h}) {
      if (engine->serves == nullptr && !engine->waiting.empty()) begin(device, *engine);
    }
  }
}

void Simulation::begin(Device& device, Engine& engine) {
  engine.serves = std::get<Lane*>(*engine.waiting.begin());
  engine.waiting.erase(engine.waiting.begin());
  engine.serves->began = time_;
  const Work& work = *engine.serves->tasks.front().work;
  if (!is_link(engine.unit)) {
    engine.ends = time_ + (engine.serves->device == kDrive ? model_.drive(work) : model_.kernel(work));
    return;
  }
  engine.since = time_ + model_.latency();
  engine.left = work.nbytes;
  engine.alone = model_.link_rate(work);
  engine.rate = 0;
  share_link(device);
}

// One direction has begun or ended: both flow on, at the rates that they have now.
void Simulation::share_link(Device& device) {
  const bool both = device.h2d.serves != nullptr && device.d2h.serves != nullptr;
  for (Engine* engine : {&device.h2d, &device.d2h}) {
    if (engine->serves == nullptr) continue;
    if (time_ > engine->since) {
      engine->left = std::max(0.0, engine->left - engine->rate * (time_ - engine->since));
      engine->since = time_;
    }
    engine->rate = engine->alone * (both ? model_.share_beside(engine->unit) : 1);
    engine->ends = engine->since + std::llround(engine->left / engine->rate);
  }
}

bool models_time() { return Simulation::on(); }

bool computes() { return !settings().dry; }

}  // namespace emulator

// For the Python package: whether time is modelled, and the host's time in nanoseconds.
ACL_EXPORT int ascend_emulator_models_time() { return emulator::Simulation::on(); }
ACL_EXPORT int64_t ascend_emulator_now() { return emulator::Simulation::get().now(); }
