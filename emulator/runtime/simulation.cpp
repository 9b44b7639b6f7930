#include "simulation.h"

#include "stream_point.h"
#include "settings.h"

#include <algorithm>

namespace emulator {

// A call of the host: it costs what the model says, and so do torch's operators since the last call. That of a launch
// has one operator in it. Holds the lock.
class Simulation::Call {
 public:
  Call(Simulation& simulation, Nanoseconds cost, bool launches = false) : lock_(simulation.mutex_) {
    const int64_t operators = std::exchange(simulation.operators_, 0) - (launches ? 1 : 0);
    simulation.host_ += cost + std::max<int64_t>(0, operators) * simulation.model_.torch_operator();
    simulation.devices_.go_on(simulation.host_);
  }

  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  // Works out all that has come to pass by the host's time.
  void settle(Simulation& simulation) {
    while (const auto joint = simulation.devices_.settle(simulation.host_)) wait_for_end(*joint);
  }

  // Other threads may call meanwhile.
  void wait_for_end(JointOperation& joint) {
    lock_.unlock();
    joint.wait_for_end();
    lock_.lock();
  }

 private:
  std::unique_lock<std::mutex> lock_;
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
  return std::make_shared<Lane>(Lane{.device = device, .stream = stream});
}

void Simulation::issue(const std::shared_ptr<Lane>& lane, const Operation& operation) {
  const bool calls = operation.body != nullptr;
  const bool works = calls && operation.work.unit != Unit::none;
  Call call(*this, !operation.own_call ? 0 : calls ? model_.issue() : model_.event(), calls);
  issue_at_host_time(lane, {.name = operation.name,
                            .nbytes = bytes_written(operation),
                            .work = works ? std::optional(operation.work) : std::nullopt,
                            .awaits = operation.awaits,
                            .reaches = operation.reaches,
                            .joint = operation.joint});
}

void Simulation::capture(const Operation& operation) {
  const bool calls = operation.body != nullptr;
  Call call(*this, !operation.own_call ? 0 : calls ? model_.issue() : model_.event(), calls);
}

void Simulation::replay() { Call call(*this, model_.issue()); }

void Simulation::run_now(int device, const Work& work, bool own_call) {
  Call call(*this, own_call ? model_.issue() : 0);
  const auto lane = open(device, 0);
  issue_at_host_time(lane, {.work = work});
  wait_until(call, [&] { return lane->tasks.empty(); }, own_call ? model_.wait() : 0);
}

void Simulation::issue_at_host_time(const std::shared_ptr<Lane>& lane, ModelledDevices::Task task) {
  task.number = ++issued_;
  task.issued = host_;
  devices_.add(lane, std::make_shared<const ModelledDevices::Task>(std::move(task)));
  devices_.go_on(host_);
}

void Simulation::begin_operator() {
  std::lock_guard lock(mutex_);
  ++operators_;
}

void Simulation::go_on() {
  std::lock_guard lock(mutex_);
  devices_.go_on(host_);
}

void Simulation::wait_for(const Lane& lane) {
  Call call(*this, 0);
  wait_until(call, [&] { return lane.tasks.empty(); }, model_.wait());
}

bool Simulation::wait_for(const Lane& lane, Nanoseconds at_most) {
  Call call(*this, 0);
  const Nanoseconds until = host_ + at_most;
  call.settle(*this);
  while (!lane.tasks.empty() && devices_.next_at() <= until) {
    if (const auto joint = devices_.step()) call.wait_for_end(*joint);
  }
  const bool ended = lane.tasks.empty();
  // A wait in vain costs something, so that whoever keeps waiting gets there.
  host_ = ended ? std::max(host_, devices_.time()) + model_.wait() : until + model_.query();
  return ended;
}

void Simulation::wait_for(const StreamPoint& point) {
  Call call(*this, 0);
  call.settle(*this);
  // Who finds that it has passed does not fall asleep, and need not be woken: reading a time does this twice.
  const bool passed = point.modelled().has_value();
  wait_until(call, [&] { return point.modelled().has_value(); }, passed ? model_.query() : model_.wait());
}

void Simulation::wait_for_device(int device) {
  Call call(*this, 0);
  wait_until(call, [&] { return !devices_.is_busy(device); }, model_.wait());
}

std::shared_ptr<Simulation::Lane> Simulation::use_drive(int drive, bool reads, size_t nbytes) {
  Call call(*this, 0);
  const auto lane = open(ModelledDevices::device_of_drive(drive), 0);
  issue_at_host_time(lane, {.name = reads ? "drive_read" : "drive_write",
                            .nbytes = nbytes,
                            .work = Work{.unit = reads ? Unit::drive_read : Unit::drive_write,
                                         .nbytes = static_cast<double>(nbytes)}});
  return lane;
}

bool Simulation::cancel(Lane& lane) {
  Call call(*this, 0);
  return devices_.cancel(lane);
}

std::pair<Nanoseconds, Nanoseconds> Simulation::times_of(const Lane& lane) {
  std::lock_guard lock(mutex_);
  return {lane.began, lane.ended};
}

template <class Done>
void Simulation::wait_until(Call& call, Done done, Nanoseconds cost) {
  call.settle(*this);
  while (!done()) {
    if (const auto joint = devices_.step()) call.wait_for_end(*joint);
  }
  host_ = std::max(host_, devices_.time()) + cost;
}

bool Simulation::asked(const Lane& lane) {
  Call call(*this, model_.query());
  call.settle(*this);
  return lane.tasks.empty();
}

bool Simulation::asked(const StreamPoint& point) {
  Call call(*this, model_.query());
  call.settle(*this);
  return point.modelled().has_value();
}

std::optional<Nanoseconds> Simulation::time_of(const StreamPoint& point) {
  Call call(*this, 0);
  call.settle(*this);
  return point.modelled();
}

Nanoseconds Simulation::now() {
  Call call(*this, 0);
  return host_;
}

Nanoseconds Simulation::at_last_call() {
  std::lock_guard lock(mutex_);
  return host_;
}

void torch_operator_begins() { Simulation::get().begin_operator(); }

bool models_time() { return Simulation::on(); }

bool computes() { return !settings().dry; }

}  // namespace emulator

// For the Python package: whether time is modelled, and the host's time in nanoseconds.
ACL_EXPORT int ascend_emulator_models_time() { return emulator::Simulation::on(); }
ACL_EXPORT int64_t ascend_emulator_now() { return emulator::Simulation::get().now(); }
