// Events: points in streams that other streams and the host can wait for.
#include "captures.h"
#include "copy.h"
#include "detector.h"
#include "fault.h"
#include "stream.h"

#include <pthread.h>

#include <map>
#include <stdexcept>
#include <string>

namespace emulator {
namespace {

// An event stands for its newest record. A wait keeps the point that it was issued for, so the event may be recorded
// again, on any stream, or destroyed while it is in use.
class Event {
 public:
  aclError record(aclrtStream stream) {
    auto point = std::make_shared<StreamPoint>();
    Operation record{.name = "event_record", .reads = {}, .writes = {}, .body = {}, .reaches = point};
    const aclError code = submit(stream, std::move(record));
    if (code != ACL_SUCCESS) return code;
    // Only now, when it is queued: a wait that got in before it on the same stream would never end.
    std::lock_guard lock(mutex_);
    (point->graph() ? captured_ : newest_) = std::move(point);
    return ACL_SUCCESS;
  }

  // The capture in which it was recorded, while that goes on. Once it has ended, the event is what it was before.
  std::shared_ptr<Graph> capture() {
    std::lock_guard lock(mutex_);
    const auto graph = captured_ ? captured_->graph() : nullptr;
    return graph && graph->is_captured_to() ? graph : nullptr;
  }

  std::shared_ptr<StreamPoint> captured() {
    std::lock_guard lock(mutex_);
    return captured_;
  }

  // Empty before the first record.
  std::shared_ptr<StreamPoint> newest() {
    std::lock_guard lock(mutex_);
    return newest_;
  }

 private:
  std::mutex mutex_;
  std::shared_ptr<StreamPoint> newest_;
  std::shared_ptr<StreamPoint> captured_;  // the newest record in a capture
};

// All events. torch_npu may use one that another thread has just destroyed; a call keeps what it has found.
class Events {
 public:
  static Events& all() {
    static auto* events = new Events;  // never destroyed: see Streams
    return *events;
  }

  aclrtEvent create() {
    auto event = std::make_shared<Event>();
    const aclrtEvent handle = event.get();
    std::lock_guard lock(mutex_);
    events_.emplace(handle, std::move(event));
    return handle;
  }

  // Empty for what is not an event, or was destroyed.
  std::shared_ptr<Event> find(aclrtEvent handle) {
    std::lock_guard lock(mutex_);
    const auto found = events_.find(handle);
    return found == events_.end() ? nullptr : found->second;
  }

  bool destroy(aclrtEvent handle) {
    std::lock_guard lock(mutex_);
    return events_.erase(handle) > 0;
  }

 private:
  std::mutex mutex_;
  std::map<aclrtEvent, std::shared_ptr<Event>> events_;
};

aclError unknown(const char* function) {
  return fail(ACL_ERROR_RT_PARAM_INVALID, std::string(function) + ": not an event, or one that was destroyed");
}

aclError captured(const char* function) {
  return refuse_captured(ACL_ERROR_RT_EVENT_CAPTURED, function, "the event");
}

// The stream is captured, too, from now on.
aclError wait_in_capture(aclrtStream handle, Event& event, const std::shared_ptr<Graph>& graph) {
  if (handle == nullptr) {
    return fail(ACL_ERROR_RT_STREAM_CAPTURE_IMPLICIT, "aclrtStreamWaitEvent: the default stream cannot be captured");
  }
  const auto stream = Streams::all().find(handle);
  if (!stream) {
    return fail(ACL_ERROR_RT_STREAM_CONTEXT, "aclrtStreamWaitEvent: not a stream, or one that was destroyed");
  }
  if (const aclError code = Captures::get().join(stream, graph); code != ACL_SUCCESS) return code;
  return submit(handle,
                {.name = "event_wait", .reads = {}, .writes = {}, .body = {}, .awaits = event.captured()});
}

// torch_npu's watchdog asks once a second, on a thread of its own, whether collectives have ended. That is no call of
// the program: it costs no modelled time, what it learns the program has not learnt, and no schedule hears of it.
bool is_watchdog() {
  char name[16] = "";
  pthread_getname_np(pthread_self(), name, sizeof name);
  return std::string(name).starts_with("hccl_watchdog");
}

// Asked by the host. What has passed in modelled time is waited for, for the host may now look at the memory.
bool has_passed(StreamPoint& point) {
  if (!Simulation::on()) return point.asked();
  if (!Simulation::get().asked(point)) return false;
  point.wait();
  return true;
}

// Nothing if one of them has not been reached.
std::optional<std::chrono::nanoseconds> time_between(StreamPoint& first, StreamPoint& last) {
  if (Simulation::on()) {
    const auto from = Simulation::get().time_of(first);
    const auto to = Simulation::get().time_of(last);
    if (!from || !to) return std::nullopt;
    return std::chrono::nanoseconds(*to - *from);
  }
  if (!first.reached() || !last.reached()) return std::nullopt;
  return last.when() - first.when();
}

void host_waited(const StreamPoint& point) {
  if (Detector::on()) Detector::get().host_waited(point.known());
}

}  // namespace
}  // namespace emulator

using namespace emulator;

ACL_EXPORT aclError aclrtCreateEventExWithFlag(aclrtEvent* event, uint32_t) {
  if (const aclError code = fault("aclrtCreateEvent"); code != ACL_SUCCESS) return code;
  *event = Events::all().create();
  return ACL_SUCCESS;
}

ACL_EXPORT aclError aclrtCreateEventWithFlag(aclrtEvent* event, uint32_t flag) {
  if (flag == ACL_EVENT_EXTERNAL) {
    throw std::runtime_error("external events, between a graph and what is outside it, are not emulated");
  }
  return aclrtCreateEventExWithFlag(event, flag);
}

ACL_EXPORT aclError aclrtCreateEvent(aclrtEvent* event) { return aclrtCreateEventExWithFlag(event, 0); }

ACL_EXPORT aclError aclrtDestroyEvent(aclrtEvent event) {
  return Events::all().destroy(event) ? ACL_SUCCESS : unknown("aclrtDestroyEvent");
}

ACL_EXPORT aclError aclrtRecordEvent(aclrtEvent handle, aclrtStream stream) {
  const auto event = Events::all().find(handle);
  return event ? event->record(stream) : unknown("aclrtRecordEvent");
}

ACL_EXPORT aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent handle) {
  const auto event = Events::all().find(handle);
  if (!event) return unknown("aclrtStreamWaitEvent");
  if (const auto graph = event->capture()) return wait_in_capture(stream, *event, graph);
  const auto point = event->newest();
  if (!point || misbehaves("lost_wait")) return ACL_SUCCESS;
  if (is_captured(stream)) {
    return fail(ACL_ERROR_RT_CAPTURE_DEPENDENCY,
                "aclrtStreamWaitEvent: a captured stream cannot wait for an event that was recorded outside the capture");
  }
  return submit(stream, {.name = "event_wait", .reads = {}, .writes = {}, .body = {}, .awaits = point});
}

ACL_EXPORT aclError aclrtSynchronizeEvent(aclrtEvent handle) {
  const auto event = Events::all().find(handle);
  if (!event) return unknown("aclrtSynchronizeEvent");
  if (event->capture()) return captured("aclrtSynchronizeEvent");
  if (const auto point = event->newest()) {
    if (Simulation::on()) Simulation::get().wait_for(*point);
    point->wait();
    host_waited(*point);
    land_late_bytes();
  }
  return device_is_lost() ? lost() : ACL_SUCCESS;
}

ACL_EXPORT aclError aclrtQueryEventStatus(aclrtEvent handle, aclrtEventRecordedStatus* status) {
  const auto event = Events::all().find(handle);
  if (!event) return unknown("aclrtQueryEventStatus");
  if (event->capture()) return captured("aclrtQueryEventStatus");
  if (device_is_lost()) return lost();
  const auto point = event->newest();
  const bool watchdog = point && is_watchdog();
  const bool reached = !point || (watchdog ? point->reached() : has_passed(*point));
  if (point && reached && !watchdog) host_waited(*point);
  *status = reached ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
  return ACL_SUCCESS;
}

ACL_EXPORT aclError aclQueryEventRecordedStatus(aclrtEvent event, aclrtEventRecordedStatus* status) {
  return aclrtQueryEventStatus(event, status);
}

// Waits are bound to a record when they are issued, so none is outstanding that a reset would have to cancel.
ACL_EXPORT aclError aclrtQueryEventWaitStatus(aclrtEvent, aclrtEventWaitStatus* status) {
  *status = ACL_EVENT_WAIT_STATUS_COMPLETE;
  return ACL_SUCCESS;
}

ACL_EXPORT aclError aclrtEventElapsedTime(float* milliseconds, aclrtEvent start, aclrtEvent end) {
  const auto first = Events::all().find(start);
  const auto last = Events::all().find(end);
  if (!first || !last) return unknown("aclrtEventElapsedTime");
  if (first->capture() || last->capture()) return captured("aclrtEventElapsedTime");
  const auto from = first->newest();
  const auto to = last->newest();
  const auto elapsed = from && to ? time_between(*from, *to) : std::nullopt;
  if (!elapsed) {
    return fail(ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID, "aclrtEventElapsedTime: an event has not been reached yet");
  }
  *milliseconds = std::chrono::duration<float, std::milli>(*elapsed).count();
  return ACL_SUCCESS;
}
