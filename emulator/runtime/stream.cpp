#include "stream.h"

#include <algorithm>
#include <atomic>
#include <exception>

namespace emulator {
namespace {

int next_stream_id() {
  static std::atomic<int> last{0};
  return ++last;
}

aclError told(const StreamError& error) {
  return error.code == ACL_SUCCESS ? ACL_SUCCESS : fail(error.code, error.message);
}

}  // namespace

Stream::Stream() : id_(next_stream_id()), thread_([this] { run(); }) {}

Stream::~Stream() {
  {
    std::lock_guard lock(mutex_);
    closing_ = true;
  }
  arrived_.notify_all();
  thread_.join();
}

void Stream::push(Operation operation) {
  {
    std::lock_guard lock(mutex_);
    queue_.push_back(std::move(operation));
  }
  arrived_.notify_one();
}

StreamError Stream::synchronize() {
  std::unique_lock lock(mutex_);
  drained_.wait(lock, [this] { return queue_.empty() && !busy_; });
  return error_;
}

bool Stream::idle() {
  std::lock_guard lock(mutex_);
  return queue_.empty() && !busy_;
}

void Stream::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    arrived_.wait(lock, [this] { return closing_ || !queue_.empty(); });
    if (queue_.empty()) return;
    Operation operation = std::move(queue_.front());
    queue_.pop_front();
    busy_ = true;
    lock.unlock();
    execute(operation);
    operation = {};  // what the body holds is let go before the stream counts as drained
    lock.lock();
    busy_ = false;
    if (queue_.empty()) drained_.notify_all();
  }
}

void Stream::execute(Operation& operation) {
  try {
    operation.body();
  } catch (const std::exception& failure) {
    std::lock_guard lock(mutex_);
    if (error_.code == ACL_SUCCESS) {
      error_ = {ACL_ERROR_RT_INTERNAL_ERROR, operation.name + " failed on the device: " + failure.what()};
    }
  }
}

Streams& Streams::all() {
  static auto* streams = new Streams;
  return *streams;
}

Stream* Streams::create() {
  std::lock_guard lock(mutex_);
  return streams_.emplace_back(std::make_unique<Stream>()).get();
}

void Streams::destroy(Stream* stream) {
  std::unique_ptr<Stream> doomed;
  {
    std::lock_guard lock(mutex_);
    auto found = std::find_if(streams_.begin(), streams_.end(), [=](auto& s) { return s.get() == stream; });
    if (found == streams_.end()) return;
    doomed = std::move(*found);
    streams_.erase(found);
  }
}

Stream* Streams::find(aclrtStream handle) {
  if (handle != nullptr) return static_cast<Stream*>(handle);
  std::lock_guard lock(mutex_);
  if (default_ == nullptr) default_ = streams_.emplace_back(std::make_unique<Stream>()).get();
  return default_;
}

std::vector<Stream*> Streams::list() {
  std::lock_guard lock(mutex_);
  std::vector<Stream*> streams;
  for (auto& stream : streams_) streams.push_back(stream.get());
  return streams;
}

StreamError Streams::synchronize() {
  StreamError first;
  for (Stream* stream : list()) {
    StreamError error = stream->synchronize();
    if (first.code == ACL_SUCCESS) first = error;
  }
  return first;
}

bool Streams::idle() {
  for (Stream* stream : list()) {
    if (!stream->idle()) return false;
  }
  return true;
}

aclError submit(aclrtStream stream, Operation operation) {
  Streams::all().find(stream)->push(std::move(operation));
  return ACL_SUCCESS;
}

}  // namespace emulator

using namespace emulator;

ACL_EXPORT aclError aclrtCreateStreamWithConfig(aclrtStream* stream, uint32_t, uint32_t) {
  *stream = Streams::all().create();
  return ACL_SUCCESS;
}

ACL_EXPORT aclError aclrtCreateStream(aclrtStream* stream) { return aclrtCreateStreamWithConfig(stream, 0, 0); }

ACL_EXPORT aclError aclrtDestroyStream(aclrtStream stream) {
  Streams::all().destroy(static_cast<Stream*>(stream));
  return ACL_SUCCESS;
}

ACL_EXPORT aclError aclrtDestroyStreamForce(aclrtStream stream) { return aclrtDestroyStream(stream); }

ACL_EXPORT aclError aclrtSynchronizeStream(aclrtStream stream) {
  return told(Streams::all().find(stream)->synchronize());
}

// The timeout is not kept: an operation of the emulator ends, or the test that waits for it has one of its own.
ACL_EXPORT aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t) {
  return aclrtSynchronizeStream(stream);
}

ACL_EXPORT aclError aclrtSynchronizeDevice() { return told(Streams::all().synchronize()); }

ACL_EXPORT aclError aclrtSynchronizeDeviceWithTimeout(int32_t) { return aclrtSynchronizeDevice(); }

ACL_EXPORT aclError aclrtStreamQuery(aclrtStream stream, aclrtStreamStatus* status) {
  const bool idle = Streams::all().find(stream)->idle();
  *status = idle ? ACL_STREAM_STATUS_COMPLETE : ACL_STREAM_STATUS_NOT_READY;
  return ACL_SUCCESS;
}

ACL_EXPORT aclError aclrtStreamGetId(aclrtStream stream, int32_t* id) {
  *id = Streams::all().find(stream)->id();
  return ACL_SUCCESS;
}
