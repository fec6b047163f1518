// An agent in miniature, with everything that a writer meets: the real segment, the real roles, the real trainer
// socket; only diffing and pulling are left out (a sealed half is served at once, a retired one freed at once, unless
// a test says otherwise).
#pragma once

#include <atomic>
#include <boost/asio/io_context.hpp>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "agent/trainer/trainer_server.hpp"
#include "base/deadline.hpp"
#include "deltasync/writer.hpp"
#include "shm/arriving_memory.hpp"
#include "shm/roles.hpp"
#include "tests/support/model.hpp"

namespace deltasync::test {

class MiniAgent final : public agent::TrainerHooks {
 public:
  /// Adopts a segment that an agent before left in `dir`. Aborts on failure.
  explicit MiniAgent(std::filesystem::path dir, agent::TrainerServerOptions options = {});
  ~MiniAgent() override;

  static std::string socket_in(const std::filesystem::path& dir) { return (dir / "agent.sock").string(); }

  /// While set, sealed halves stay SEALED (the agent is busy), so that a later begin has to wait.
  std::atomic<bool> busy{false};
  /// While set, every layout gets the segment that is there.
  std::atomic<bool> mixes_layouts_up{false};
  /// Called by the server's own thread before it opens a segment for a trainer.
  void before_open(std::function<void()> call);
  /// While set, what ready() answers.
  void fail_ready(std::optional<Error> error);

  agent::TrainerServer& server() { return *server_; }
  /// Of the served version, copied.
  std::vector<std::byte> served_bytes() const;
  VersionId served() const;
  /// The process on record for a slot; 0 if there is none.
  std::int32_t slot_owner(std::uint32_t slot) const;
  /// Slots whose writers are gone, in order.
  std::vector<std::uint32_t> gone() const;
  std::uint64_t notifications() const { return notifications_; }
  /// How often ready() was looked at.
  std::uint64_t asked() const { return asked_; }
  std::uint64_t generation() const;
  /// What a relay has said to come, oldest first, and the memory where; of nothing: none.
  struct Arrived {
    wire::TrainerArrival said;
    std::unique_ptr<shm::ArrivingMemory> memory;
  };
  std::size_t arrivals() const;
  /// By its place; what said() names is a copy.
  wire::TrainerArrival said(std::size_t i) const;
  const shm::ArrivingMemory* memory(std::size_t i) const;
  /// Elements that writers have counted as in place in the open fill.
  std::uint64_t progress() const;
  /// "FREE", "FILLING" … of both halves.
  std::string halves() const;

  Result<agent::OpenSegment> open_segment(LayoutPtr layout, ByteSpan layout_encoded, ByteSpan sidecar_encoded,
                                          const ProcessId& asker) override;
  Result<std::uint64_t> grant(std::uint64_t generation, std::uint32_t slot, std::uint32_t writers,
                              ProcessWatch watch) override;
  void writer_gone(std::uint64_t generation, std::uint32_t slot, std::uint64_t grant) override;
  void segment_changed() override;
  Status arrives(std::uint64_t connection, std::uint64_t generation, wire::TrainerArrival said,
                 UniqueFd memory) override;
  Result<std::optional<wire::TrainerReady>> ready(const VersionId& version) override;

 private:
  struct Generation {
    std::uint64_t number = 0;
    std::unique_ptr<shm::Segment> segment;
    std::unique_ptr<shm::AgentRole> role;
  };
  void adopt();
  void publish_loop();
  void publish(Generation& generation);
  std::shared_ptr<Generation> current() const;

  const std::filesystem::path dir_;
  boost::asio::io_context io_;
  std::unique_ptr<agent::TrainerServer> server_;
  std::atomic<std::uint64_t> notifications_{0};
  std::atomic<std::uint64_t> asked_{0};
  std::atomic<bool> stop_{false};

  mutable std::mutex mutex_;
  std::shared_ptr<Generation> current_;  // protected by mutex_, as all below
  VersionId served_;
  std::vector<std::uint32_t> gone_;
  std::vector<Arrived> arrivals_;
  std::optional<Error> ready_error_;
  std::function<void()> before_open_;

  std::thread io_thread_;
  std::thread publisher_;
};

inline Deadline in_ms(int ms) {
  return Deadline::after(std::chrono::milliseconds(ms));
}
/// Long enough for a loaded machine; a test that gets here has failed.
inline Deadline soon() {
  return in_ms(60'000);
}
/// Looks again and again until `condition` holds or soon() has passed; the last look decides.
template <class F>
bool eventually(F condition) {
  const Deadline deadline = soon();
  while (!deadline.passed()) {
    if (condition()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return condition();
}

inline Version version(std::uint64_t epoch, std::uint64_t number) {
  return {{epoch, number}, "step_" + std::to_string(number)};
}

inline WriterOptions writer_options(const std::filesystem::path& dir, std::uint32_t index = 0,
                                    std::uint32_t writers = 1) {
  WriterOptions options;
  options.agent_socket = MiniAgent::socket_in(dir);
  options.writer_index = index;
  options.writers = writers;
  options.threads = 2;
  return options;
}

/// Writes one slice out of a half-shaped buffer, so that slices have strides of their own.
inline Status write_slice(Writer& writer, const std::vector<std::byte>& half, std::uint32_t tensor, const Rect& rect) {
  const Tensor& t = writer.layout()->tensors()[tensor];
  Source source;
  source.data = half.data() + t.offset + rect.row * t.row_bytes() + rect.col * t.element_bytes;
  source.row_stride_bytes = static_cast<std::size_t>(t.row_bytes());
  return writer.write(tensor, rect, source);
}
inline Rect whole(const Layout& layout, std::uint32_t tensor) {
  return {0, 0, layout.tensors()[tensor].rows, layout.tensors()[tensor].cols};
}
/// All tensors, in layout order.
inline Status write_all(Writer& writer, const std::vector<std::byte>& half) {
  for (std::uint32_t i = 0; i < writer.layout()->tensors().size(); ++i) {
    DS_TRY(write_slice(writer, half, i, whole(*writer.layout(), i)));
  }
  return {};
}

/// The rectangles of one of `writers` writers: tensors are cut by columns where they are wide enough, else by rows,
/// else given to the writers in turn. All writers' shares together cover the layout.
std::vector<TensorSlice> share(const Layout& layout, std::uint32_t writer, std::uint32_t writers);

/// Each tensor's rows are columns.
std::vector<std::byte> transposed(const Layout& layout, const std::vector<std::byte>& half);

}  // namespace deltasync::test
