#include "tests/writer/harness.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "base/thread_pool.hpp"
#include "delta/delta.hpp"

namespace deltasync::test {
namespace {

constexpr const char* kSegmentPrefix = "mini.g";

template <class T>
T must(Result<T> result, const char* what) {
  if (!result) {
    std::fprintf(stderr, "MiniAgent: %s: %s\n", what, result.error().to_string().c_str());
    std::abort();
  }
  return std::move(result).value();
}

}  // namespace

MiniAgent::MiniAgent(std::filesystem::path dir, agent::TrainerServerOptions options) : dir_(std::move(dir)) {
  adopt();
  options.socket_path = socket_in(dir_);
  server_ = must(agent::TrainerServer::listen(io_, *this, options), "listen");
  io_thread_ = std::thread([this] {
    set_thread_name("mini-io");
    io_.run();
  });
  publisher_ = std::thread([this] {
    set_thread_name("mini-publish");
    publish_loop();
  });
}

MiniAgent::~MiniAgent() {
  server_->stop();
  io_thread_.join();  // a conversation that outlived stop() would hang here, and the test's timeout would tell
  stop_ = true;
  publisher_.join();
}

void MiniAgent::adopt() {
  std::uint64_t newest = 0;
  for (const auto& entry : std::filesystem::directory_iterator(dir_)) {
    const std::string name = entry.path().filename();
    if (name.rfind(kSegmentPrefix, 0) == 0) {
      newest = std::max<std::uint64_t>(newest, std::strtoull(name.c_str() + std::strlen(kSegmentPrefix), nullptr, 10));
    }
  }
  if (newest == 0) return;
  auto generation = std::make_shared<Generation>();
  generation->number = newest;
  generation->segment = must(shm::Segment::attach({dir_, kSegmentPrefix + std::to_string(newest)}), "attach");
  generation->role = must(shm::AgentRole::adopt(*generation->segment), "adopt");
  if (const auto active = generation->role->active()) served_ = active->version.id;
  current_ = std::move(generation);
}

std::shared_ptr<MiniAgent::Generation> MiniAgent::current() const {
  const std::lock_guard lock(mutex_);
  return current_;
}

void MiniAgent::publish_loop() {
  while (!stop_) {
    const auto generation = current();
    if (!generation) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      continue;
    }
    generation->role->wait_for_change(in_ms(5));
    generation->role->reap();
    publish(*generation);
  }
}

void MiniAgent::publish(Generation& generation) {
  if (busy) return;
  const auto sealed = generation.role->sealed();
  if (!sealed || !generation.role->activate(*sealed)) return;
  if (const auto retiring = generation.role->retiring()) generation.role->retire_done(*retiring);
  {
    const std::lock_guard lock(mutex_);
    served_ = sealed->version.id;
  }
  server_->version_served();
}

std::vector<std::byte> MiniAgent::served_bytes() const {
  const auto generation = current();
  const auto active = generation->role->active();
  if (!active) return {};
  const auto half = generation->segment->half(active->half);
  return {half.begin(), half.end()};
}

VersionId MiniAgent::served() const {
  const std::lock_guard lock(mutex_);
  return served_;
}

void MiniAgent::before_open(std::function<void()> call) {
  const std::lock_guard lock(mutex_);
  before_open_ = std::move(call);
}

std::int32_t MiniAgent::slot_owner(std::uint32_t slot) const {
  const auto now = current();
  return now ? shm::inspect_slot(*now->segment, slot).pid : 0;
}

std::vector<std::uint32_t> MiniAgent::gone() const {
  const std::lock_guard lock(mutex_);
  return gone_;
}

std::uint64_t MiniAgent::generation() const {
  const auto generation = current();
  return generation ? generation->number : 0;
}

std::uint64_t MiniAgent::progress() const {
  const auto generation = current();
  const auto fill = generation ? generation->role->filling() : std::nullopt;
  return fill ? shm::inspect_progress(*generation->segment, fill->half, fill->sequence) : 0;
}

std::string MiniAgent::halves() const {
  const auto generation = current();
  std::string text;
  for (unsigned h = 0; h < shm::kHalves; ++h) {
    text += (h == 0 ? "" : " ") + std::string(to_string(shm::inspect_half(*generation->segment, h).state));
  }
  return text;
}

void MiniAgent::fail_ready(std::optional<Error> error) {
  {
    const std::lock_guard lock(mutex_);
    ready_error_ = std::move(error);
  }
  server_->version_served();
}

Result<agent::OpenSegment> MiniAgent::open_segment(LayoutPtr layout, ByteSpan layout_encoded, ByteSpan sidecar_encoded,
                                                   const ProcessId&) {
  std::function<void()> before;
  {
    const std::lock_guard lock(mutex_);
    before = before_open_;
  }
  if (before) before();
  const auto now = current();
  if (now && (mixes_layouts_up || now->segment->layout_digest() == layout->digest())) {
    const VersionId newest = shm::inspect_newest(*now->segment).id;
    DS_ASSIGN(UniqueFd file, now->segment->hand_over());
    return agent::OpenSegment{now->segment->path(), now->number, newest, std::move(file), newest.epoch};
  }
  if (now) {
    now->role->reap();
    if (!now->role->watch_fds().empty()) return Error(Errc::layout_mismatch, "a live writer uses another layout");
  }
  auto next = std::make_shared<Generation>();
  next->number = now ? now->number + 1 : 1;
  const shm::Segment::Geometry geometry{layout->half_bytes(), delta::make_batches(*layout).size(), layout->digest()};
  DS_ASSIGN(next->segment, shm::Segment::create({dir_, kSegmentPrefix + std::to_string(next->number)}, next->number,
                                                geometry, layout_encoded, sidecar_encoded));
  DS_ASSIGN(next->role, shm::AgentRole::adopt(*next->segment));
  DS_ASSIGN(UniqueFd file, next->segment->hand_over());
  agent::OpenSegment open{next->segment->path(), next->number, {}, std::move(file)};
  const std::lock_guard lock(mutex_);
  current_ = std::move(next);
  return open;
}

Result<std::uint64_t> MiniAgent::grant(std::uint64_t, std::uint32_t slot, std::uint32_t writers, ProcessWatch watch) {
  return current()->role->grant_slot(slot, writers, std::move(watch));
}

void MiniAgent::writer_gone(std::uint64_t generation, std::uint32_t slot, std::uint64_t grant) {
  const auto now = current();
  if (now->number == generation) {
    now->role->reap();
    now->role->revoke_slot(slot, grant);
  }
  const std::lock_guard lock(mutex_);
  gone_.push_back(slot);
}

Status MiniAgent::arrives(std::uint64_t /*connection*/, std::uint64_t /*generation*/, wire::TrainerArrival said,
                          UniqueFd memory) {
  Arrived arrived;
  if (said.version.id.valid()) {
    const std::shared_ptr<Generation> generation = current();
    const std::uint64_t half_bytes = generation->segment->half_bytes();
    DS_ASSIGN(arrived.memory, shm::ArrivingMemory::open(std::move(memory), {said.digests.size(), half_bytes}));
  }
  arrived.said = std::move(said);
  const std::lock_guard lock(mutex_);
  arrivals_.push_back(std::move(arrived));
  return {};
}

std::size_t MiniAgent::arrivals() const {
  const std::lock_guard lock(mutex_);
  return arrivals_.size();
}

wire::TrainerArrival MiniAgent::said(std::size_t i) const {
  const std::lock_guard lock(mutex_);
  return arrivals_.at(i).said;
}

const shm::ArrivingMemory* MiniAgent::memory(std::size_t i) const {
  const std::lock_guard lock(mutex_);
  return arrivals_.at(i).memory.get();
}

void MiniAgent::segment_changed() {
  ++notifications_;
  if (const auto now = current()) now->role->wake();
}

Result<std::optional<wire::TrainerReady>> MiniAgent::ready(const VersionId& version) {
  ++asked_;
  const std::lock_guard lock(mutex_);
  if (ready_error_) return *ready_error_;
  if (served_.epoch != version.epoch || served_ < version) return std::optional<wire::TrainerReady>();
  wire::TrainerReady answer;
  answer.version = served_;
  return std::optional<wire::TrainerReady>(answer);
}

std::vector<TensorSlice> share(const Layout& layout, std::uint32_t writer, std::uint32_t writers) {
  std::vector<TensorSlice> slices;
  const auto cut = [&](std::uint64_t n, std::uint32_t i) { return n * i / writers; };
  for (std::uint32_t i = 0; i < layout.tensors().size(); ++i) {
    const Tensor& t = layout.tensors()[i];
    if (t.bytes == 0) continue;
    Rect rect{0, 0, t.rows, t.cols};
    if (t.cols >= writers) {
      rect.col = cut(t.cols, writer);
      rect.cols = cut(t.cols, writer + 1) - rect.col;
    } else if (t.rows >= writers) {
      rect.row = cut(t.rows, writer);
      rect.rows = cut(t.rows, writer + 1) - rect.row;
    } else if (i % writers != writer) {
      continue;
    }
    slices.push_back({i, rect});
  }
  return slices;
}

std::vector<std::byte> transposed(const Layout& layout, const std::vector<std::byte>& half) {
  std::vector<std::byte> out(half.size());
  for (const Tensor& t : layout.tensors()) {
    for (std::uint64_t row = 0; row < t.rows; ++row) {
      for (std::uint64_t col = 0; col < t.cols; ++col) {
        std::memcpy(out.data() + t.offset + (col * t.rows + row) * t.element_bytes,
                    half.data() + t.offset + row * t.row_bytes() + col * t.element_bytes, t.element_bytes);
      }
    }
  }
  return out;
}

}  // namespace deltasync::test
