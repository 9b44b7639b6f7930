// Events: a mark on one stream that other streams and the host can wait for.
#include "stream.h"

#include <chrono>

namespace emulator {
namespace {

using Clock = std::chrono::steady_clock;

// One record of an event: a point in a stream that is reached once.
class Mark {
 public:
  void reach() {
    {
      std::lock_guard lock(mutex_);
      reached_ = true;
      when_ = Clock::now();
    }
    changed_.notify_all();
  }

  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return reached_; });
  }

  bool reached() {
    std::lock_guard lock(mutex_);
    return reached_;
  }

  Clock::time_point when() {
    std::lock_guard lock(mutex_);
    return when_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool reached_ = false;
  Clock::time_point when_;
};

// An event stands for its newest record. A wait keeps the mark that it was issued for, so the event may be recorded
// again, on any stream, or destroyed while it is in use.
class Event {
 public:
  aclError record(aclrtStream stream) {
    auto mark = std::make_shared<Mark>();
    const aclError code = submit(stream, {"event_record", {}, {}, [mark] { mark->reach(); }});
    if (code != ACL_SUCCESS) return code;
    // Only now, when it is queued: a wait that got in before it on the same stream would never end.
    std::lock_guard lock(mutex_);
    newest_ = std::move(mark);
    return ACL_SUCCESS;
  }

  // Empty before the first record.
  std::shared_ptr<Mark> newest() {
    std::lock_guard lock(mutex_);
    return newest_;
  }

 private:
  std::mutex mutex_;
  std::shared_ptr<Mark> newest_;
};

Event& event_of(aclrtEvent handle) { return *static_cast<Event*>(handle); }

}  // namespace
}  // namespace emulator

using namespace emulator;

ACL_EXPORT aclError aclrtCreateEventExWithFlag(aclrtEvent* event, uint32_t) {
  *event = new Event;
  return ACL_SUCCESS;
}

ACL_EXPORT aclError aclrtCreateEventWithFlag(aclrtEvent* event, uint32_t flag) {
  return aclrtCreateEventExWithFlag(event, flag);
}

ACL_EXPORT aclError aclrtCreateEvent(aclrtEvent* event) { return aclrtCreateEventExWithFlag(event, 0); }

ACL_EXPORT aclError aclrtDestroyEvent(aclrtEvent event) {
  delete &event_of(event);
  return ACL_SUCCESS;
}

ACL_EXPORT aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream) { return event_of(event).record(stream); }

ACL_EXPORT aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event) {
  const auto mark = event_of(event).newest();
  return mark ? submit(stream, {"event_wait", {}, {}, [mark] { mark->wait(); }}) : ACL_SUCCESS;
}

ACL_EXPORT aclError aclrtSynchronizeEvent(aclrtEvent event) {
  if (const auto mark = event_of(event).newest()) mark->wait();
  return ACL_SUCCESS;
}

ACL_EXPORT aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus* status) {
  const auto mark = event_of(event).newest();
  *status = !mark || mark->reached() ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
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
  const auto from = event_of(start).newest();
  const auto to = event_of(end).newest();
  if (!from || !to || !from->reached() || !to->reached()) {
    return fail(ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID, "aclrtEventElapsedTime: an event has not been reached yet");
  }
  *milliseconds = std::chrono::duration<float, std::milli>(to->when() - from->when()).count();
  return ACL_SUCCESS;
}
