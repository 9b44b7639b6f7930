#include "stream.h"

#include "detector.h"
#include "device.h"
#include "fault.h"
#include "graph.h"
#include "memory.h"
#include "poison.h"
#include "schedule.h"
#include "settings.h"
#include "timeline.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <utility>

namespace emulator {
namespace {

int next_stream_id() {
  static std::atomic<int> last{0};
  return ++last;
}

bool touches_freed_memory(const Operation& operation) {
  const auto freed = [](const Range& range) { return Memory::get().place_of(range.begin) == Place::freed; };
  return std::any_of(operation.reads.begin(), operation.reads.end(), freed) ||
         std::any_of(operation.writes.begin(), operation.writes.end(), freed);
}

// What torch's allocator took back is poisoned by whoever uses it next, and not before: what used it until then may
// still be on its way, as long as that next use waits for it.
std::function<void()> with_poison_before(const std::vector<Range>& reused, std::function<void()> body) {
  return [reused, body = std::move(body)] {
    for (const Range& range : reused) poison(const_cast<void*>(range.begin), range.nbytes);
    body();
  };
}

// PyTorch adds a C++ backtrace below the message of its exceptions.
std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

StreamError failure_of(const Operation& operation, const std::exception& failure) {
  return {ACL_ERROR_RT_INTERNAL_ERROR, operation.name + " failed on the device: " + first_line(failure.what())};
}

}  // namespace

Stream::Stream(int device)
    : id_(next_stream_id()),
      device_(device),
      slot_(Detector::on() ? Detector::get().enter() : 0),
      lane_(Simulation::on() ? Simulation::get().open(device, id_) : nullptr),
      permitted_(Schedule::get().initially_permitted()),
      thread_(settings().dry ? std::thread() : std::thread([this] { run(); })) {}

Stream::~Stream() {
  {
    std::lock_guard lock(mutex_);
    closing_ = true;
  }
  arrived_.notify_all();
  if (thread_.joinable()) thread_.join();
  if (Detector::on()) Detector::get().leave(slot_);
}

std::shared_ptr<Graph> Stream::capture() {
  std::shared_ptr<Graph> graph;  // a graph may end here, which waits for streams: never under a stream's lock
  {
    std::lock_guard lock(mutex_);
    graph = capture_.lock();
  }
  return graph && graph->is_captured_to() ? graph : nullptr;
}

void Stream::enter(const std::shared_ptr<Graph>& capture) {
  std::lock_guard lock(mutex_);
  capture_ = capture;
}

void Stream::push(Operation operation, int site) {
  {
    std::lock_guard lock(mutex_);
    ++pushed_;
    // Under this lock, so that the detector sees operations in the order in which they will run.
    if (Detector::on()) {
      const auto reused = Detector::get().submitted(slot_, id_, operation, site);
      if (!reused.empty()) operation.body = with_poison_before(reused, std::move(operation.body));
    }
    if (operation.reaches) {
      VectorClock known = Detector::on() ? Detector::get().known_to(slot_) : VectorClock{};
      operation.reaches->place(weak_from_this(), pushed_, std::move(known));
    }
    if (lane_) Simulation::get().issue(lane_, operation);
    if (thread_.joinable()) queue_.push_back(std::move(operation));
  }
  if (thread_.joinable()) {
    arrived_.notify_one();
  } else {
    run_now(operation);
  }
}

void Stream::run_now(Operation& operation) {
  execute(operation);
  {
    std::lock_guard lock(mutex_);
    ++done_;
  }
  finished_.notify_all();
}

StreamError Stream::synchronize() {
  if (lane_) Simulation::get().wait_for(*lane_);
  drain();
  return told();
}

void Stream::drain() {
  std::unique_lock lock(mutex_);
  const uint64_t last = pushed_;
  const VectorClock known = Detector::on() ? Detector::get().known_to(slot_) : VectorClock{};
  lock.unlock();
  Schedule::get().need(*this, last);
  lock.lock();
  finished_.wait(lock, [this, last] { return done_ >= last; });
  if (Detector::on()) Detector::get().host_waited(known);
}

StreamError Stream::told() {
  std::lock_guard lock(mutex_);
  StreamError refused = std::exchange(refused_, {});
  return error_.code == ACL_SUCCESS ? refused : error_;
}

bool Stream::idle() {
  if (lane_) {
    if (!Simulation::get().asked(*lane_)) return false;
    drain();
    return true;
  }
  std::unique_lock lock(mutex_);
  const uint64_t last = pushed_;
  const VectorClock known = Detector::on() ? Detector::get().known_to(slot_) : VectorClock{};
  lock.unlock();
  Schedule::get().polled(*this, last);
  if (!finished(last)) return false;
  if (Detector::on()) Detector::get().host_waited(known);
  return true;
}

void Stream::permit(uint64_t position) {
  {
    std::lock_guard lock(mutex_);
    permitted_ = std::max(permitted_, position);
  }
  arrived_.notify_one();
}

bool Stream::finished(uint64_t position) {
  std::lock_guard lock(mutex_);
  return done_ >= position;
}

bool Stream::busy() {
  std::lock_guard lock(mutex_);
  return done_ < pushed_;
}

bool Stream::ready() {
  std::lock_guard lock(mutex_);
  const bool begun = permitted_ > done_;  // one that calls the program
  if (queue_.empty() || begun) return false;
  const Operation& next = queue_.front();
  return (!next.awaits || next.awaits->reached()) && (!next.joint || next.joint->ready());
}

void Stream::demand() {
  std::shared_ptr<JointOperation> joint;
  {
    std::lock_guard lock(mutex_);
    if (!queue_.empty()) joint = queue_.front().joint;
  }
  if (joint) joint->demand();
}

void Stream::run_one() {
  std::unique_lock lock(mutex_);
  const uint64_t next = done_ + 1;
  const bool waits = !queue_.front().calls_the_program;
  permitted_ = std::max(permitted_, next);
  arrived_.notify_one();
  if (!waits) return;
  finished_.wait(lock, [this, next] { return done_ >= next; });
}

uint64_t Stream::count_poll() {
  std::lock_guard lock(mutex_);
  return ++polls_;
}

void Stream::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    arrived_.wait(lock, [this] { return closing_ || (!queue_.empty() && done_ < permitted_); });
    if (queue_.empty()) return;
    Operation operation = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    execute(operation);
    operation = {};  // what the body holds is let go before the operation counts as done
    lock.lock();
    ++done_;
    finished_.notify_all();
  }
}

void Stream::execute(Operation& operation) {
  if (operation.awaits) {
    if (!operation.awaits->reached()) operation.awaits->wait();
    take_over(operation.awaits->error());
  }
  if (operation.joint && device_is_lost()) operation.joint->abandon();
  if (operation.body && !device_is_lost()) {
    try {
      Timeline::Entry entry(device_, id_, operation);
      if (operation.joint) operation.joint->wait();
      operation.body();
    } catch (const Refusal& refusal) {
      std::lock_guard lock(mutex_);
      if (refused_.code == ACL_SUCCESS) refused_ = failure_of(operation, refusal);
    } catch (const std::exception& failure) {
      take_over(failure_of(operation, failure));
    }
  }
  if (operation.reaches) operation.reaches->reach(error());
}

void Stream::take_over(const StreamError& error) {
  std::lock_guard lock(mutex_);
  if (error_.code == ACL_SUCCESS) error_ = error;
}

StreamError Stream::error() {
  std::lock_guard lock(mutex_);
  return error_;
}

Streams& Streams::all() {
  static auto* streams = new Streams;
  return *streams;
}

std::shared_ptr<Stream> Streams::make(int device) {
  std::lock_guard lock(mutex_);
  return streams_.emplace_back(std::make_shared<Stream>(device));
}

std::shared_ptr<Stream> Streams::find(aclrtStream handle) {
  std::lock_guard lock(mutex_);
  if (handle == nullptr) {
    const int device = current_device();
    if (defaults_.size() <= static_cast<size_t>(device)) defaults_.resize(device + 1);
    auto& stream = defaults_[device];
    if (!stream) stream = streams_.emplace_back(std::make_shared<Stream>(device));
    return stream;
  }
  auto found = std::find_if(streams_.begin(), streams_.end(), [=](auto& stream) { return stream.get() == handle; });
  return found == streams_.end() ? nullptr : *found;
}

void Streams::destroy(const std::shared_ptr<Stream>& stream) {
  stream->drain();  // while the schedule still finds it
  std::lock_guard lock(mutex_);
  std::erase(streams_, stream);
}

std::vector<std::shared_ptr<Stream>> Streams::list() {
  std::lock_guard lock(mutex_);
  return streams_;
}

StreamError Streams::synchronize(int device) {
  if (Simulation::on()) Simulation::get().wait_for_device(device);
  StreamError first;
  for (const auto& stream : list()) {
    if (stream->device() != device) continue;
    stream->drain();
    if (first.code == ACL_SUCCESS) first = stream->told();
  }
  return first;
}

bool Streams::captures(int device) {
  const auto streams = list();
  return std::any_of(streams.begin(), streams.end(),
                     [=](auto& stream) { return stream->device() == device && stream->capture() != nullptr; });
}

bool Streams::busy() {
  const auto streams = list();
  return std::any_of(streams.begin(), streams.end(), [](auto& stream) { return stream->busy(); });
}

std::vector<std::shared_ptr<Stream>> Streams::ready() {
  auto streams = list();
  std::erase_if(streams, [](auto& stream) { return !stream->ready(); });
  return streams;
}

void Streams::demand() {
  for (const auto& stream : list()) stream->demand();
}

size_t bytes_written(const Operation& operation) {
  size_t nbytes = 0;
  for (const Range& range : operation.writes.empty() ? operation.reads : operation.writes) nbytes += range.nbytes;
  return nbytes;
}

aclError submit(aclrtStream handle, Operation operation) {
  const auto stream = Streams::all().find(handle);
  if (!stream) return fail(ACL_ERROR_RT_STREAM_CONTEXT, operation.name + ": not a stream, or one that was destroyed");
  if (const auto graph = stream->capture()) return graph->add(*stream, std::move(operation));
  // Asked before any lock is taken: to know where the program is, Python's own lock is needed.
  const int site = Detector::on() && operation.body ? Detector::get().site() : 0;
  return issue(stream, std::move(operation), site);
}

aclError issue(const std::shared_ptr<Stream>& stream, Operation operation, int site) {
  if (const aclError code = count_towards_loss(); code != ACL_SUCCESS) return code;
  if (touches_freed_memory(operation)) {
    return fail(ACL_ERROR_RT_PARAM_INVALID, operation.name + ": memory that was freed");
  }
  give_other_bits(operation);
  stream->push(std::move(operation), site);
  Schedule::get().submitted();
  return ACL_SUCCESS;
}

// A graph keeps its memory. What torch takes back of it is handed out only within its captures, and there the bytes that
// replays read and write say what must be ordered. When torch tells of it says nothing of when replays use it.
void freed_by_torch(aclrtStream handle, Range block) {
  if (Graph::one_writes_to(block)) return;
  if (const auto stream = Streams::all().find(handle)) Detector::get().taken_back(stream->id(), block);
}

}  // namespace emulator
