// The modelled devices: when operations begin and end on them, given when the host has issued them.
//
// A stream's operations begin in order, none before it was issued. One that needs an engine (of each device there are
// three: for computing, and for each direction of its link) waits there behind those that were ready before it. While
// both directions of the link move bytes, each is slower. A drive of the machine does one operation at a time, reads
// before writes. A joint operation of several ranks ends when all have arrived and the bytes have gone
// round.
//
// The cards share the host's memory. What the links of other ranks do is told with their arrivals, and holds from the
// end of the joint operation to that of the next one: how it was used lately stands for how it is used until then.
//
// What others do must be the same in each run, and so must not depend on when this process happens to hear of them. So
// the end of a joint operation is worked out only when the host wants to know what has come to pass, and it waits for
// that if need be. The other ranks in turn cannot wait for this one's host: when its stream will arrive is foreseen as
// the operation is issued, namely for the case that the host issues nothing more.
#pragma once

#include "model.h"
#include "operation.h"

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace emulator {

class ModelledDevices {
 public:
  // One operation that has not ended.
  struct Task {
    uint64_t number = 0;  // in the order of issue
    Nanoseconds issued = 0;
    std::string name = "";  // empty: not for the timeline
    size_t nbytes = 0;
    std::optional<Work> work = {};  // nothing for what takes no time
    std::shared_ptr<StreamPoint> awaits = nullptr;
    std::shared_ptr<StreamPoint> reaches = nullptr;
    std::shared_ptr<JointOperation> joint = nullptr;
  };

  // A stream.
  struct Lane {
    int device;
    int stream;
    std::deque<std::shared_ptr<const Task>> tasks = {};
    bool begun = false;  // whether the first one waits for an engine, is on it, or waits for other ranks
    Nanoseconds began = 0;
    Nanoseconds ended = 0;  // the last one that did
  };

  // A drive counts as a device, whose engine it is: the first one as -1, the next as -2.
  static constexpr int device_of_drive(int drive) { return -1 - drive; }
  static constexpr bool is_drive(int device) { return device < 0; }

  explicit ModelledDevices(const Model& model) : model_(model) {}
  virtual ~ModelledDevices() = default;

  // Up to which all is worked out.
  Nanoseconds time() const { return time_; }
  bool is_busy(int device) const;

  void add(const std::shared_ptr<Lane>& lane, std::shared_ptr<const Task> task);
  // Takes back the one task of a lane of a drive. False if it has begun.
  bool cancel(Lane& lane);

  // Lets happen what happens until then, but not the end of a joint operation, nor what is later than that.
  void go_on(Nanoseconds until);

  // When the next thing happens. Lets it happen, or all until then. Returns the joint operation whose end must be known
  // before that.
  Nanoseconds next_at() { return next().at; }
  std::shared_ptr<JointOperation> step();
  std::shared_ptr<JointOperation> settle(Nanoseconds until);

 protected:
  using JointOperations = std::map<const JointOperation*, std::shared_ptr<JointOperation>>;

  // What is on its way in that one, up to a task.
  ModelledDevices(const ModelledDevices& other, uint64_t last_number);

  virtual void ended(const Lane& lane, const Task& task);
  virtual void reached(StreamPoint& point);
  virtual bool is_reached(const StreamPoint& point) const;
  virtual std::optional<Nanoseconds> end_of(JointOperation& joint) { return joint.ends(); }
  const std::vector<std::shared_ptr<Lane>>& busy() const { return busy_; }
  LinkUse use_of(int device, Nanoseconds now);

 private:
  static constexpr Nanoseconds kNever = INT64_MAX;

  struct Engine {
    Unit unit;  // h2d, d2h, or any other for computing and for drives
    // Writes to a drive come last; else by when it was ready, then in the order of issue.
    std::set<std::tuple<bool, Nanoseconds, uint64_t, Lane*>> waiting{};
    Lane* serves = nullptr;
    Nanoseconds ends = kNever;

    // Of a link: since when bytes flow at this rate, and how many were left then.
    Nanoseconds since = 0;
    double left = 0;
    double alone = 0;  // the rate that it would have
    double rate = 0;
    double used = 0;  // at `used_at`, how much of the time it was; see LinkUse
    Nanoseconds used_at = 0;
    double others = 0;   // the links that use the host's memory in this direction beside this one: while it is busy
    double instead = 0;  // and while it is not

    double use(Nanoseconds now) const;
    void note_use(Nanoseconds now);
  };

  struct Device {
    Engine compute{.unit = Unit::vector};
    Engine h2d{.unit = Unit::h2d};
    Engine d2h{.unit = Unit::d2h};

    Engine& of(Unit unit) { return unit == Unit::h2d ? h2d : unit == Unit::d2h ? d2h : compute; }
  };

  // What happens next: an engine ends, or a lane's joint operation; or a task is issued.
  struct Next {
    Nanoseconds at = kNever;
    Engine* engine = nullptr;
    Lane* lane = nullptr;
    std::shared_ptr<JointOperation> unknown = nullptr;  // that joint operation, if when it ends is not known
  };

  Next next();
  std::shared_ptr<JointOperation> let_happen(const Next& next);
  void end_first(Lane& lane);
  std::shared_ptr<JointOperation> foresee();
  JointOperations needed_by(const Task& joint) const;
  void begin_what_can();
  void begin_on_engines();
  void begin(Device& device, Engine& engine);
  void share_link(Device& device);
  void hear(int device, JointOperation& joint);

  const Model& model_;
  Nanoseconds time_ = 0;
  std::vector<std::shared_ptr<Lane>> busy_;  // the lanes that have tasks
  std::map<int, Device> devices_;
  std::map<int, LinkUse> told_;  // by the device: what was heard last
  std::map<const JointOperation*, Nanoseconds> least_ends_;  // of those whose arrival is told
  std::deque<std::shared_ptr<const Task>> unforeseen_;  // joint ones whose arrival is not told yet; time stops at these
};

}  // namespace emulator
