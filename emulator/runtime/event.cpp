// Events: a mark on one stream that other streams and the host can wait for.
#include "stream.h"

#include <chrono>

namespace emulator {
namespace {

using Clock = std::chrono::steady_clock;

// An event can be recorded again and again; a wait is for the record that was newest when the wait was issued.
class Event {
 public:
  uint64_t issue() {
    std::lock_guard lock(mutex_);
    return ++issued_;
  }

  uint64_t newest() {
    std::lock_guard lock(mutex_);
    return issued_;
  }

  void reach(uint64_t record) {
    {
      std::lock_guard lock(mutex_);
      reached_ = std::max(reached_, record);
      when_ = Clock::now();
    }
    changed_.notify_all();
  }

  void wait(uint64_t record) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return reached_ >= record; });
  }

  bool complete() {
    std::lock_guard lock(mutex_);
    return reached_ >= issued_;
  }

  Clock::time_point when() {
    std::lock_guard lock(mutex_);
    return when_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t issued_ = 0;
  uint64_t reached_ = 0;
  Clock::time_point when_;
};

// The handle owns a share, and so does each queued record and wait: an event may be destroyed while it is in use.
using Shared = std::shared_ptr<Event>;

Shared& event_of(aclrtEvent handle) { return *static_cast<Shared*>(handle); }

}  // namespace
}  // namespace emulator

using namespace emulator;

ACL_EXPORT aclError aclrtCreateEventExWithFlag(aclrtEvent* event, uint32_t) {
  *event = new Shared(std::make_shared<Event>());
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

ACL_EXPORT aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream) {
  Shared shared = event_of(event);
  const uint64_t record = shared->issue();
  return submit(stream, {"event_record", {}, {}, [=] { shared->reach(record); }});
}

ACL_EXPORT aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event) {
  Shared shared = event_of(event);
  const uint64_t record = shared->newest();
  return submit(stream, {"event_wait", {}, {}, [=] { shared->wait(record); }});
}

ACL_EXPORT aclError aclrtSynchronizeEvent(aclrtEvent event) {
  Shared shared = event_of(event);
  shared->wait(shared->newest());
  return ACL_SUCCESS;
}

ACL_EXPORT aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus* status) {
  const bool complete = event_of(event)->complete();
  *status = complete ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
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
  if (!event_of(start)->complete() || !event_of(end)->complete()) {
    return fail(ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID, "aclrtEventElapsedTime: an event has not been reached yet");
  }
  const auto elapsed = event_of(end)->when() - event_of(start)->when();
  *milliseconds = std::chrono::duration<float, std::milli>(elapsed).count();
  return ACL_SUCCESS;
}
