// Functions of the host that a stream calls in its turn: on a thread of its own, or on one that asks for them.
#include "stream.h"

#include <pthread.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>

using namespace emulator;

namespace {

// Which thread of the program makes the calls of which stream, and those that wait for it.
class Subscriptions {
 public:
  static Subscriptions& all() {
    static auto* subscriptions = new Subscriptions;  // never destroyed: see Streams
    return *subscriptions;
  }

  bool add(uint64_t thread, aclrtStream stream) {
    std::lock_guard lock(mutex_);
    return threads_.emplace(stream, thread).second;
  }

  bool remove(uint64_t thread, aclrtStream stream) {
    std::lock_guard lock(mutex_);
    const auto found = threads_.find(stream);
    if (found == threads_.end() || found->second != thread) return false;
    threads_.erase(found);
    changed_.notify_all();
    return true;
  }

  bool has(aclrtStream stream) {
    std::lock_guard lock(mutex_);
    return threads_.contains(stream);
  }

  // Has the stream's thread make a call, and waits for its end where that is wished.
  void put(aclrtStream stream, const std::function<void()>& function, bool waits) {
    std::unique_lock lock(mutex_);
    const auto found = threads_.find(stream);
    if (found == threads_.end()) throw std::runtime_error("a callback's thread has unsubscribed from its stream");
    const auto call = std::make_shared<Call>(Call{function});
    calls_[found->second].push_back(call);
    changed_.notify_all();
    if (!waits) return;
    changed_.wait(lock, [&] { return call->made || !threads_.contains(stream); });
    if (!call->made) throw std::runtime_error("a callback's thread has unsubscribed before it made the call");
  }

  // Makes one call on this thread; false where none came in time.
  bool make(std::chrono::milliseconds timeout, bool forever) {
    std::unique_lock lock(mutex_);
    auto& waiting = calls_[pthread_self()];
    const auto some = [&] { return !waiting.empty(); };
    if (forever) {
      changed_.wait(lock, some);
    } else if (!changed_.wait_for(lock, timeout, some)) {
      return false;
    }
    const auto call = waiting.front();
    waiting.pop_front();
    lock.unlock();
    call->function();
    lock.lock();
    call->made = true;
    changed_.notify_all();
    return true;
  }

 private:
  struct Call {
    std::function<void()> function;
    bool made = false;
  };

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<aclrtStream, uint64_t> threads_;
  std::map<uint64_t, std::deque<std::shared_ptr<Call>>> calls_;
};

}  // namespace

ACL_EXPORT aclError aclrtLaunchHostFunc(aclrtStream stream, aclrtHostFunc function, void* data) {
  const auto body = [=] { function(data); };
  return submit(stream, {.name = "host function", .reads = {}, .writes = {}, .body = body, .calls_the_program = true});
}

ACL_EXPORT aclError aclrtSubscribeReport(uint64_t thread, aclrtStream stream) {
  if (Subscriptions::all().add(thread, stream)) return ACL_SUCCESS;
  return fail(ACL_ERROR_RT_THREAD_SUBSCRIBE, "aclrtSubscribeReport: a thread has subscribed to the stream already");
}

ACL_EXPORT aclError aclrtUnSubscribeReport(uint64_t thread, aclrtStream stream) {
  if (Subscriptions::all().remove(thread, stream)) return ACL_SUCCESS;
  return fail(ACL_ERROR_RT_THREAD_SUBSCRIBE, "aclrtUnSubscribeReport: the thread has not subscribed to the stream");
}

// The stream goes on when the call has ended, or at once. In a dry run it does not wait, for it has no thread that could.
ACL_EXPORT aclError aclrtLaunchCallback(aclrtCallback function, void* data, aclrtCallbackBlockType kind,
                                        aclrtStream stream) {
  if (!Subscriptions::all().has(stream)) {
    return fail(ACL_ERROR_RT_STREAM_NO_CB_REG, "aclrtLaunchCallback: no thread has subscribed to the stream");
  }
  const bool waits = kind == ACL_CALLBACK_BLOCK && computes();
  const auto body = [=] { Subscriptions::all().put(stream, [=] { function(data); }, waits); };
  return submit(stream, {.name = "callback", .reads = {}, .writes = {}, .body = body, .calls_the_program = true});
}

ACL_EXPORT aclError aclrtProcessReport(int32_t timeout_ms) {
  if (Subscriptions::all().make(std::chrono::milliseconds(timeout_ms), timeout_ms < 0)) return ACL_SUCCESS;
  return fail(ACL_ERROR_RT_REPORT_TIMEOUT, "aclrtProcessReport: no callback was to be called");
}
