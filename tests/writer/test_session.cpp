// One writer, one agent: what a version costs and holds, and every way in which a caller can go wrong.
#include <gmock/gmock-matchers.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <iterator>
#include <stdexcept>
#include <thread>

#include "base/deadline.hpp"
#include "base/form_choice.hpp"
#include "net/unix_listener.hpp"
#include "tests/shm/support.hpp"
#include "tests/support/without_threads.hpp"
#include "tests/writer/harness.hpp"
#include "writer/copy_forms.hpp"
#include "writer/relay_access.hpp"

namespace deltasync::test {
namespace {

using shm::testing::TempDir;
using ::testing::HasSubstr;

class WriterSessionTest : public ::testing::Test {
 protected:
  void SetUp() override { agent_ = std::make_unique<MiniAgent>(dir_.path()); }

  std::unique_ptr<Writer> attach() {
    auto writer = Writer::attach(model_.layout, make_sidecar(*model_.layout), writer_options(dir_.path()), soon());
    if (!writer) ADD_FAILURE() << writer.error().to_string();
    return std::move(writer).value();
  }
  const Layout& layout() const { return *model_.layout; }
  /// The first tensor of more than one row and column.
  std::uint32_t matrix() const {
    for (std::uint32_t i = 0; i < layout().tensors().size(); ++i) {
      if (layout().tensors()[i].rows > 3 && layout().tensors()[i].cols > 3) return i;
    }
    ADD_FAILURE() << "the sample model has no matrix";
    return 0;
  }
  /// Whatever went wrong before, the next version goes through and the half holds it.
  void expect_works(Writer& writer, std::uint64_t number) {
    const auto status = writer.begin(version(7, number), soon());
    ASSERT_TRUE(status) << status.error().to_string();
    ASSERT_TRUE(write_all(writer, model_.half));
    const auto report = writer.commit(soon());
    ASSERT_TRUE(report) << report.error().to_string();
    ASSERT_TRUE(writer.wait_ready({7, number}, soon()));
    EXPECT_TRUE(agent_->served_bytes() == model_.half);
  }

  TempDir dir_;
  TestModel model_ = make_model(11);
  std::unique_ptr<MiniAgent> agent_;
};

TEST_F(WriterSessionTest, VersionsArriveByteForByteAndAreReported) {
  auto writer = attach();
  EXPECT_FALSE(writer->newest().valid());
  for (std::uint64_t number = 1; number <= 5; ++number) {
    ASSERT_TRUE(writer->begin(version(7, number), soon()));
    ASSERT_TRUE(write_all(*writer, model_.half));
    const auto report = writer->commit(soon());
    ASSERT_TRUE(report) << report.error().to_string();
    EXPECT_EQ(report->version, version(7, number));
    EXPECT_EQ(report->bytes, layout().model_bytes());
    EXPECT_EQ(report->tensors, layout().tensors().size());
    EXPECT_GE(report->total_s, report->guard_s + report->copy_s + report->seal_s);
    EXPECT_EQ(writer->newest(), (VersionId{7, number}));
    ASSERT_TRUE(writer->wait_ready({7, number}, soon()));
    EXPECT_TRUE(agent_->served_bytes() == model_.half) << "padding included: it stays zero";
    mutate(model_.half, layout(), 0.2, number);
  }
  EXPECT_TRUE(eventually([&] { return agent_->notifications() == 5; }));
}

/// By the copies of its third version: all pages were touched by then. Each tensor is one copy.
TEST_F(WriterSessionTest, TheFormOfCopiesIsChosenInTheThirdVersion) {
  std::vector<TensorSpec> specs;
  for (std::size_t i = 0; i < FormChoice::kTimesEach * copy_forms().size(); ++i) {
    specs.push_back({"w" + std::to_string(i), Dtype::bf16, {256, 512}, {}, {}});
  }
  const LayoutPtr layout = *Layout::build(std::move(specs));
  const std::vector<std::byte> half(layout->half_bytes(), std::byte{7});
  auto writer = *Writer::attach(layout, make_sidecar(*layout), writer_options(dir_.path()), soon());
  for (std::uint64_t number = 1; number <= 3; ++number) {
    ASSERT_TRUE(writer->begin(version(7, number), soon()));
    for (std::uint32_t t = 0; t < layout->tensors().size(); ++t) {
      const Tensor& tensor = layout->tensors()[t];
      ASSERT_TRUE(writer->write(t, {0, 0, tensor.rows, tensor.cols}, Source{half.data() + tensor.offset}));
    }
    const auto report = writer->commit(soon());
    ASSERT_TRUE(report) << report.error().to_string();
    EXPECT_EQ(report->copy_form.empty(), number < 3) << number;
    ASSERT_TRUE(writer->wait_ready({7, number}, soon()));
  }
}

TEST_F(WriterSessionTest, WhatTheSegmentHoldsAndWhatIsBeingFilledCanBeRead) {
  auto writer = attach();
  EXPECT_FALSE(held_version(*writer));
  EXPECT_TRUE(writer->filling().empty());
  const auto is = [](std::span<const std::byte> bytes, const std::vector<std::byte>& half) {
    return std::equal(bytes.begin(), bytes.end(), half.begin(), half.end());
  };
  std::vector<std::byte> before;
  for (std::uint64_t number = 1; number <= 3; ++number) {
    ASSERT_TRUE(writer->begin(version(7, number), soon()));
    ASSERT_TRUE(write_all(*writer, model_.half));
    EXPECT_TRUE(is(writer->filling(), model_.half));
    ASSERT_EQ(held_version(*writer).has_value(), number > 1) << "an open fill is no version";
    if (number > 1) {
      EXPECT_EQ(held_version(*writer)->version, version(7, number - 1));
      EXPECT_TRUE(is(held_version(*writer)->bytes, before));
    }
    ASSERT_TRUE(writer->commit(soon()));
    EXPECT_TRUE(writer->filling().empty());
    ASSERT_TRUE(held_version(*writer));
    EXPECT_EQ(held_version(*writer)->version, version(7, number));
    EXPECT_TRUE(is(held_version(*writer)->bytes, model_.half)) << "sealed, whether it is served yet or not";
    before = model_.half;
    mutate(model_.half, layout(), 0.2, number);
  }
  writer.reset();
  writer = attach();
  ASSERT_TRUE(held_version(*writer)) << "another session's version";
  EXPECT_EQ(held_version(*writer)->version, version(7, 3));
}

TEST_F(WriterSessionTest, OffloadTakesAnyRangeOfNamesAndSources) {
  auto writer = attach();
  std::vector<std::pair<std::string, Source>> tensors;
  for (const Tensor& t : layout().tensors()) {
    Source source;
    source.data = model_.half.data() + t.offset;
    tensors.emplace_back(t.spec.name, source);
  }
  const auto report = writer->offload(version(7, 1), tensors, soon());
  ASSERT_TRUE(report) << report.error().to_string();
  ASSERT_TRUE(writer->wait_ready({7, 1}, soon()));
  EXPECT_TRUE(agent_->served_bytes() == model_.half);

  tensors.back().first = "no.such.tensor";
  const auto missing = writer->offload(version(7, 2), tensors, soon());
  ASSERT_FALSE(missing);
  EXPECT_EQ(missing.error().code(), Errc::not_found);
  EXPECT_THAT(missing.error().message(), HasSubstr("no.such.tensor"));
  expect_works(*writer, 2);
}

TEST_F(WriterSessionTest, SlicesInAnyOrderMakeAVersion) {
  auto writer = attach();
  ASSERT_TRUE(writer->begin(version(7, 1), soon()));
  for (const std::uint32_t part : {2u, 0u, 1u}) {
    for (const TensorSlice& s : share(layout(), part, 3)) {
      const auto status = write_slice(*writer, model_.half, s.tensor, s.rect);
      ASSERT_TRUE(status) << status.error().to_string();
    }
  }
  ASSERT_TRUE(writer->commit(soon()));
  ASSERT_TRUE(writer->wait_ready({7, 1}, soon()));
  EXPECT_TRUE(agent_->served_bytes() == model_.half);
}

TEST_F(WriterSessionTest, ABatchIsAsGoodAsItsWritesOneByOne) {
  auto writer = attach();
  std::vector<SliceSource> batch;
  for (const std::uint32_t part : {2u, 0u, 1u}) {
    for (const TensorSlice& s : share(layout(), part, 3)) {
      const Tensor& t = layout().tensors()[s.tensor];
      Source source;
      source.data = model_.half.data() + t.offset + s.rect.row * t.row_bytes() + s.rect.col * t.element_bytes;
      source.row_stride_bytes = t.row_bytes();
      batch.push_back({s, source});
    }
  }
  for (std::uint64_t number = 1; number <= 3; ++number) {
    ASSERT_TRUE(writer->begin(version(7, number), soon()));
    const auto status = writer->write(batch);
    ASSERT_TRUE(status) << status.error().to_string();
    const auto report = writer->commit(soon());
    ASSERT_TRUE(report) << report.error().to_string();
    EXPECT_EQ(report->bytes, layout().model_bytes());
    ASSERT_TRUE(writer->wait_ready({7, number}, soon()));
    EXPECT_TRUE(agent_->served_bytes() == model_.half);
    mutate(model_.half, layout(), 0.2, number);
  }
  ASSERT_TRUE(writer->begin(version(7, 4), soon()));
  batch.push_back(batch.front());
  const auto twice = writer->write(batch);
  ASSERT_FALSE(twice);
  EXPECT_EQ(twice.error().code(), Errc::coverage);
  EXPECT_EQ(writer->write(batch).error().code(), Errc::aborted);
  writer->abort();
  expect_works(*writer, 4);
}

TEST_F(WriterSessionTest, SlicesThatTheTrainerHasTransposed) {
  auto writer = attach();
  std::vector<std::vector<std::byte>> transposed;
  std::vector<SliceSource> batch;
  for (const std::uint32_t part : {1u, 0u, 2u}) {
    for (const TensorSlice& s : share(layout(), part, 3)) {
      const Tensor& t = layout().tensors()[s.tensor];
      auto& memory = transposed.emplace_back(s.rect.elements() * t.element_bytes);
      for (std::uint64_t r = 0; r < s.rect.rows; ++r) {
        for (std::uint64_t c = 0; c < s.rect.cols; ++c) {
          std::memcpy(
              memory.data() + (c * s.rect.rows + r) * t.element_bytes,
              model_.half.data() + t.offset + (s.rect.row + r) * t.row_bytes() + (s.rect.col + c) * t.element_bytes,
              t.element_bytes);
        }
      }
      batch.push_back({s,
                       {.data = memory.data(),
                        .row_stride_bytes = t.element_bytes,
                        .col_stride_bytes = static_cast<std::size_t>(s.rect.rows * t.element_bytes)}});
    }
  }
  ASSERT_TRUE(writer->begin(version(7, 1), soon()));
  const auto status = writer->write(batch);
  ASSERT_TRUE(status) << status.error().to_string();
  const auto report = writer->commit(soon());
  ASSERT_TRUE(report) << report.error().to_string();
  EXPECT_EQ(report->bytes, layout().model_bytes());
  ASSERT_TRUE(writer->wait_ready({7, 1}, soon()));
  EXPECT_TRUE(agent_->served_bytes() == model_.half);

  const std::uint32_t width = layout().tensors()[matrix()].element_bytes;
  for (const auto& [rows, cols] : {std::pair{0u, width * 8}, std::pair{width, width - 1}}) {
    ASSERT_TRUE(writer->begin(version(7, 2), soon()));
    const Source source = {.data = model_.half.data(), .row_stride_bytes = rows, .col_stride_bytes = cols};
    const auto refused = writer->write(matrix(), source);
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().code(), Errc::invalid_argument) << refused.error().to_string();
    writer->abort();
  }
}

TEST_F(WriterSessionTest, TensorWrittenTwice) {
  auto writer = attach();
  ASSERT_TRUE(writer->begin(version(7, 1), soon()));
  ASSERT_TRUE(write_all(*writer, model_.half));
  const auto status = write_slice(*writer, model_.half, matrix(), whole(layout(), matrix()));
  ASSERT_FALSE(status);
  EXPECT_EQ(status.error().code(), Errc::coverage);
  EXPECT_THAT(status.error().message(), HasSubstr(layout().tensors()[matrix()].spec.name));
  const auto report = writer->commit(soon());
  ASSERT_FALSE(report) << "a version with a failed write must not be published";
  EXPECT_FALSE(writer->newest().valid());
  expect_works(*writer, 1);
}

TEST_F(WriterSessionTest, SliceTwiceAndAnotherNever) {
  auto writer = attach();
  const Tensor& t = layout().tensors()[matrix()];
  ASSERT_TRUE(writer->begin(version(7, 1), soon()));
  for (std::uint32_t i = 0; i < layout().tensors().size(); ++i) {
    if (i == matrix()) continue;
    ASSERT_TRUE(write_slice(*writer, model_.half, i, whole(layout(), i)));
  }
  const Rect upper{0, 0, 2, t.cols};
  ASSERT_TRUE(write_slice(*writer, model_.half, matrix(), upper));
  const auto twice = write_slice(*writer, model_.half, matrix(), upper);
  ASSERT_FALSE(twice);
  EXPECT_EQ(twice.error().code(), Errc::coverage);
  EXPECT_THAT(twice.error().message(), HasSubstr("twice"));
  writer->abort();

  ASSERT_TRUE(writer->begin(version(7, 1), soon()));
  for (std::uint32_t i = 0; i < layout().tensors().size(); ++i) {
    if (i == matrix()) continue;
    ASSERT_TRUE(write_slice(*writer, model_.half, i, whole(layout(), i)));
  }
  ASSERT_TRUE(write_slice(*writer, model_.half, matrix(), upper));
  const auto never = writer->commit(soon());
  ASSERT_FALSE(never);
  EXPECT_EQ(never.error().code(), Errc::coverage);
  EXPECT_THAT(never.error().message(), HasSubstr(t.spec.name));
  EXPECT_FALSE(writer->newest().valid());
  expect_works(*writer, 1);
}

TEST_F(WriterSessionTest, NothingWritten) {
  auto writer = attach();
  expect_works(*writer, 1);
  ASSERT_TRUE(writer->begin(version(7, 2), soon()));
  const auto report = writer->commit(soon());
  ASSERT_FALSE(report);
  EXPECT_EQ(report.error().code(), Errc::coverage);
  EXPECT_EQ(agent_->served(), (VersionId{7, 1})) << "the active version stays";
  expect_works(*writer, 2);
}

TEST_F(WriterSessionTest, NumberThatGoesBackAndAnotherEpoch) {
  auto writer = attach();
  expect_works(*writer, 5);
  for (const Version& wrong : {version(7, 5), version(7, 4)}) {
    const auto status = writer->begin(wrong, soon());
    ASSERT_FALSE(status) << to_string(wrong);
    EXPECT_EQ(status.error().code(), Errc::version_conflict);
    EXPECT_THAT(status.error().message(), HasSubstr(to_string(wrong.id)));
  }
  expect_works(*writer, 6);
  for (const Version& other : {version(8, 1), version(6, 1)}) {
    ASSERT_TRUE(writer->begin(other, soon())) << "another trainer's, whichever is the later";
    writer->abort();
  }
}

TEST_F(WriterSessionTest, WrongArguments) {
  auto writer = attach();
  const Tensor& t = layout().tensors()[matrix()];
  Source source;
  source.data = model_.half.data() + t.offset;

  EXPECT_EQ(writer->write(matrix(), source).error().code(), Errc::invalid_argument) << "no fill";
  EXPECT_EQ(writer->commit(soon()).error().code(), Errc::invalid_argument) << "no fill";
  EXPECT_EQ(writer->begin({{0, 1}, ""}, soon()).error().code(), Errc::invalid_argument) << "epoch 0";
  const auto label = writer->begin({{7, 1}, std::string(kLabelBytesMax + 1, 'x')}, soon());
  EXPECT_EQ(label.error().code(), Errc::invalid_argument);
  EXPECT_THAT(label.error().message(), HasSubstr(std::to_string(kLabelBytesMax + 1)));
  EXPECT_THAT(writer->begin({{7, 1}, "2"}, soon()).error().message(), HasSubstr("another version's number"));

  const auto attempt = [&](const std::function<Status()>& wrong, Errc code) {
    ASSERT_TRUE(writer->begin(version(7, 1), soon()));
    EXPECT_EQ(writer->begin(version(7, 2), soon()).error().code(), Errc::invalid_argument) << "open already";
    const auto status = wrong();
    ASSERT_FALSE(status);
    EXPECT_EQ(status.error().code(), code) << status.error().to_string();
    // Only abort() helps after a failed write.
    EXPECT_EQ(writer->write(matrix(), source).error().code(), Errc::aborted);
    writer->abort();
  };
  const auto tensors = static_cast<std::uint32_t>(layout().tensors().size());
  const std::uint64_t huge = ~std::uint64_t{0};
  attempt([&] { return writer->write(matrix(), Rect{0, 0, t.rows + 1, t.cols}, source); }, Errc::out_of_range);
  attempt([&] { return writer->write(matrix(), Rect{0, 1, t.rows, t.cols}, source); }, Errc::out_of_range);
  attempt([&] { return writer->write(matrix(), Rect{huge, 0, 2, t.cols}, source); }, Errc::out_of_range);
  attempt([&] { return writer->write(matrix(), Rect{0, huge - 1, 1, 3}, source); }, Errc::out_of_range);
  attempt([&] { return writer->write(matrix(), Source{}); }, Errc::invalid_argument);
  attempt(
      [&] {
        Source narrow = source;
        narrow.row_stride_bytes = t.element_bytes;
        return writer->write(matrix(), narrow);
      },
      Errc::invalid_argument);
  attempt(
      [&] {
        Source device = source;
        device.device = {0};
        return writer->write(matrix(), device);
      },
      Errc::unsupported);
  ASSERT_TRUE(writer->begin(version(7, 1), soon()));
  EXPECT_EQ(writer->write(tensors, Rect{0, 0, 1, 1}, source).error().code(), Errc::out_of_range);
  EXPECT_EQ(writer->write(tensors, source).error().code(), Errc::out_of_range);
  EXPECT_EQ(writer->write("nobody", source).error().code(), Errc::not_found);
  writer->abort();
  expect_works(*writer, 1);
}

TEST_F(WriterSessionTest, NoFreeHalfEndsAtTheDeadline) {
  auto writer = attach();
  agent_->busy = true;
  for (const std::uint64_t number : {1u, 2u}) {  // both halves sealed, none served
    ASSERT_TRUE(writer->begin(version(7, number), soon()));
    ASSERT_TRUE(write_all(*writer, model_.half));
    ASSERT_TRUE(writer->commit(soon()));
  }
  const auto status = writer->begin(version(7, 3), in_ms(50));
  ASSERT_FALSE(status);
  EXPECT_EQ(status.error().code(), Errc::timed_out);
  EXPECT_THAT(status.error().message(), HasSubstr("SEALED"));
  const auto ready = writer->wait_ready({7, 1}, in_ms(50));
  ASSERT_FALSE(ready);
  EXPECT_EQ(ready.error().code(), Errc::timed_out);
  agent_->busy = false;
  expect_works(*writer, 3);
}

TEST_F(WriterSessionTest, DestructionAbortsAndFreesTheSlotAtOnce) {
  {
    auto writer = attach();
    ASSERT_TRUE(writer->begin(version(7, 1), soon()));
    ASSERT_TRUE(write_slice(*writer, model_.half, matrix(), whole(layout(), matrix())));
  }
  EXPECT_THAT(agent_->gone(), ::testing::ElementsAre(0u)) << "the goodbye is acknowledged before the destructor ends";
  auto next = attach();
  expect_works(*next, 1);
}

TEST_F(WriterSessionTest, SecondTrainerOnTheSlotIsRefused) {
  auto writer = attach();
  const auto second = Writer::attach(model_.layout, Sidecar{}, writer_options(dir_.path()), soon());
  ASSERT_FALSE(second);
  EXPECT_EQ(second.error().code(), Errc::already_exists);
  EXPECT_THAT(second.error().message(), HasSubstr("pid " + std::to_string(::getpid())));
  expect_works(*writer, 1);
}

TEST_F(WriterSessionTest, AnotherLayoutWaitsForTheWriterToLeave) {
  auto writer = attach();
  expect_works(*writer, 1);
  const TestModel other = make_model(12, {TensorSpec{"other.weight", Dtype::f32, {8, 8}, {}, {}}});
  WriterOptions options = writer_options(dir_.path(), 1, 2);
  const auto refused = Writer::attach(other.layout, Sidecar{}, options, soon());
  ASSERT_FALSE(refused);
  writer.reset();
  auto next = Writer::attach(other.layout, Sidecar{}, writer_options(dir_.path()), soon());
  ASSERT_TRUE(next) << next.error().to_string();
  EXPECT_EQ(agent_->generation(), 2u);
  ASSERT_TRUE((*next)->begin(version(9, 1), soon()));
  ASSERT_TRUE(write_all(**next, other.half));
  ASSERT_TRUE((*next)->commit(soon()));
  ASSERT_TRUE((*next)->wait_ready({9, 1}, soon()));
  EXPECT_TRUE(agent_->served_bytes() == other.half);
}

TEST_F(WriterSessionTest, WaitReadyReportsWhyItNeverWillBe) {
  auto writer = attach();
  agent_->fail_ready(Error(Errc::gone, "that epoch is over"));
  const auto status = writer->wait_ready({7, 1}, soon());
  ASSERT_FALSE(status);
  EXPECT_EQ(status.error().code(), Errc::gone);
  EXPECT_THAT(status.error().message(), HasSubstr("that epoch is over"));
  agent_->fail_ready(std::nullopt);
  expect_works(*writer, 1);
}

TEST_F(WriterSessionTest, AgentComesBackAndTheSessionFindsIt) {
  auto writer = attach();
  expect_works(*writer, 1);
  ASSERT_TRUE(writer->begin(version(7, 2), soon()));
  agent_.reset();
  // The fill needs no agent.
  mutate(model_.half, layout(), 0.3, 5);
  ASSERT_TRUE(write_all(*writer, model_.half));
  const auto report = writer->commit(soon());
  ASSERT_TRUE(report) << report.error().to_string();
  const auto absent = writer->wait_ready({7, 2}, in_ms(50));
  ASSERT_FALSE(absent);
  EXPECT_EQ(absent.error().code(), Errc::connection) << absent.error().to_string();

  agent_ = std::make_unique<MiniAgent>(dir_.path());
  ASSERT_TRUE(writer->wait_ready({7, 2}, soon()));
  EXPECT_TRUE(agent_->served_bytes() == model_.half);
  expect_works(*writer, 3);
}

TEST_F(WriterSessionTest, AgentIsRestartedWhileItIsAsked) {
  auto writer = attach();
  ASSERT_TRUE(writer->begin(version(7, 1), soon()));
  ASSERT_TRUE(write_all(*writer, model_.half));
  agent_->busy = true;
  ASSERT_TRUE(writer->commit(soon()));
  Status ready = Error(Errc::internal, "not run");
  std::thread asker([&] { ready = writer->wait_ready({7, 1}, soon()); });
  EXPECT_TRUE(eventually([&] { return agent_->asked() > 0; }));
  agent_.reset();
  agent_ = std::make_unique<MiniAgent>(dir_.path());
  asker.join();
  EXPECT_TRUE(ready) << ready.error().to_string();
}

/// The segment that the session has mapped is nobody's any more, whatever the session was doing when it found out.
TEST_F(WriterSessionTest, NothingIsPublishedInASegmentThatWasReplaced) {
  auto writer = attach();
  expect_works(*writer, 1);
  ASSERT_TRUE(writer->begin(version(7, 2), soon()));
  ASSERT_TRUE(write_all(*writer, model_.half));
  agent_.reset();
  for (const auto& entry : std::filesystem::directory_iterator(dir_.path())) std::filesystem::remove(entry.path());
  agent_ = std::make_unique<MiniAgent>(dir_.path());
  const Status asked = writer->wait_ready({7, 1}, soon());
  ASSERT_FALSE(asked);
  EXPECT_EQ(asked.error().code(), Errc::aborted) << asked.error().to_string();
  const auto lost = writer->commit(soon());
  ASSERT_FALSE(lost) << "sealed where no agent looks";
  EXPECT_EQ(lost.error().code(), Errc::aborted) << lost.error().to_string();
  expect_works(*writer, 3);
}

TEST_F(WriterSessionTest, PlanOfOneWriterIsHeldToIt) {
  auto writer = attach();
  const auto plan = share(layout(), 0, 1);
  ASSERT_TRUE(writer->register_plan(plan, soon()));
  ASSERT_TRUE(writer->begin(version(7, 1), soon()));
  const Tensor& t = layout().tensors()[matrix()];
  const auto part = write_slice(*writer, model_.half, matrix(), Rect{0, 0, 1, t.cols});
  ASSERT_FALSE(part) << "not a rectangle of the plan";
  EXPECT_EQ(part.error().code(), Errc::coverage);
  writer->abort();
  ASSERT_TRUE(writer->begin(version(7, 1), soon()));
  for (const TensorSlice& s : plan) ASSERT_TRUE(write_slice(*writer, model_.half, s.tensor, s.rect));
  ASSERT_TRUE(writer->commit(soon()));

  auto holed = plan;
  holed.erase(holed.begin() + 2);
  const auto status = writer->register_plan(holed, soon());
  ASSERT_FALSE(status);
  EXPECT_EQ(status.error().code(), Errc::coverage);
  EXPECT_THAT(status.error().message(), HasSubstr(layout().tensors()[plan[2].tensor].spec.name));
}

TEST(WriterAttach, NobodyListensUntilTheDeadline) {
  const TempDir dir;
  const TestModel model = make_model(1);
  const Deadline deadline = in_ms(100);
  const auto writer = Writer::attach(model.layout, Sidecar{}, writer_options(dir.path()), deadline);
  EXPECT_TRUE(deadline.passed());
  ASSERT_FALSE(writer);
  EXPECT_EQ(writer.error().code(), Errc::connection);
  EXPECT_THAT(writer.error().message(), HasSubstr("no agent answered until the deadline"));
  EXPECT_THAT(writer.error().message(), HasSubstr("nobody listens on " + MiniAgent::socket_in(dir.path())));
}

TEST(WriterAttach, AnAgentThatStartsLaterIsWaitedFor) {
  const TempDir dir;
  const TestModel model = make_model(1);
  const std::string path = MiniAgent::socket_in(dir.path());
  UniqueFd starting = net::listen_unix(path).value();
  Result<std::unique_ptr<Writer>> writer = Error(Errc::internal, "not run");
  std::thread trainer([&] { writer = Writer::attach(model.layout, Sidecar{}, writer_options(dir.path()), soon()); });
  // That it has begun is seen by its first attempt, which an agent that goes away again turns down.
  const bool begun = eventually([&] { return UniqueFd(::accept(starting.get(), nullptr, nullptr)).get() >= 0; });
  starting.reset();
  std::filesystem::remove(path);
  const MiniAgent agent(dir.path());
  trainer.join();
  EXPECT_TRUE(begun);
  ASSERT_TRUE(writer) << writer.error().to_string();
  writer->reset();
}

TEST(WriterAttach, WhatWillNeverBeAnAgentIsNotWaitedFor) {
  const TempDir dir;
  const TestModel model = make_model(1);
  const Deadline deadline = soon();
  dir.write("agent.sock", std::string_view("a file"));
  const auto file = Writer::attach(model.layout, Sidecar{}, writer_options(dir.path()), deadline);
  ASSERT_FALSE(file);
  EXPECT_EQ(file.error().code(), Errc::invalid_argument);
  EXPECT_THAT(file.error().message(), HasSubstr(MiniAgent::socket_in(dir.path()) + " is not a socket"));
  EXPECT_FALSE(deadline.passed()) << "it was waited for";
  WriterOptions options = writer_options(dir.path());
  options.agent_socket += "/below";
  EXPECT_EQ(Writer::attach(model.layout, Sidecar{}, options, deadline).error().code(), Errc::io);
  EXPECT_FALSE(deadline.passed()) << "it was waited for";
}

TEST(WriterAttach, WithoutThreadsItFailsAndLeavesTheSlotFree) {
  const TempDir dir;
  const TestModel model = make_model(1);
  const int code = run_without_threads([&] {
    for (int attempt = 0; attempt < 2; ++attempt) {
      const auto writer = Writer::attach(model.layout, Sidecar{}, writer_options(dir.path()), soon());
      if (writer || writer.error().code() != Errc::no_space) return 1;
      if (writer.error().message().find("threads") == std::string::npos) return 2;
    }
    return 0;
  });
  if (code == kThreadsNotLimited) GTEST_SKIP() << "this machine does not limit threads by RLIMIT_NPROC";
  EXPECT_EQ(code, 0);
}

TEST(WriterAttach, ImpossibleWriterNumbers) {
  const TestModel model = make_model(1);
  for (const auto& [index, writers] : {std::pair{0u, 0u}, {1u, 1u}, {0u, 65u}}) {
    WriterOptions options;
    options.writer_index = index;
    options.writers = writers;
    const auto writer = Writer::attach(model.layout, Sidecar{}, options, soon());
    ASSERT_FALSE(writer);
    EXPECT_EQ(writer.error().code(), Errc::invalid_argument);
  }
}

/// The first tensors of a model, one after the other, and then an exception.
struct BreakingGenerator {
  struct Iterator {
    using difference_type = std::ptrdiff_t;
    using value_type = std::pair<std::string, Source>;
    const TestModel* model = nullptr;
    std::uint32_t at = 0;

    value_type operator*() const {
      if (at == 2) throw std::runtime_error("the generator broke");
      const Tensor& t = model->layout->tensors()[at];
      Source source;
      source.data = model->half.data() + t.offset;
      return {t.spec.name, source};
    }
    Iterator& operator++() {
      ++at;
      return *this;
    }
    void operator++(int) { ++at; }
    bool operator==(std::default_sentinel_t) const { return at == 3; }
  };
  const TestModel* model;
  Iterator begin() const { return {model}; }
  std::default_sentinel_t end() const { return {}; }
};

TEST_F(WriterSessionTest, AGeneratorThatThrowsLeavesNoFillOpen) {
  auto writer = attach();
  const BreakingGenerator names{&model_};
  EXPECT_THROW(static_cast<void>(writer->offload(version(7, 1), names, soon())), std::runtime_error);
  EXPECT_FALSE(writer->newest().valid());
  expect_works(*writer, 2);
}

TEST_F(WriterSessionTest, ASegmentOfAnotherLayoutOfTheSameSizeIsRefused) {
  auto first = attach();
  auto specs = std::vector<TensorSpec>();
  for (const Tensor& t : layout().tensors()) specs.push_back(t.spec);
  specs.front().name += ".renamed";
  const auto other = Layout::build(specs).value();
  ASSERT_EQ(other->half_bytes(), layout().half_bytes());
  agent_->mixes_layouts_up = true;
  first.reset();
  const auto refused = Writer::attach(other, Sidecar{}, writer_options(dir_.path()), soon());
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code(), Errc::layout_mismatch);
  EXPECT_THAT(refused.error().message(), HasSubstr(to_string(other->digest())));
  EXPECT_THAT(refused.error().message(), HasSubstr(to_string(layout().digest())));
}

TEST_F(WriterSessionTest, APlanThatWasRefusedReplacesTheOneBefore) {
  auto writer = attach();
  ASSERT_TRUE(writer->register_plan(share(layout(), 0, 1), soon()));
  expect_works(*writer, 1);
  auto doubled = share(layout(), 0, 1);
  doubled.push_back(doubled.front());
  const auto refused = writer->register_plan(doubled, soon());
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code(), Errc::coverage);
  // Without a plan any slices do.
  ASSERT_TRUE(writer->begin(version(7, 2), soon()));
  for (const std::uint32_t part : {0u, 1u}) {
    for (const TensorSlice& s : share(layout(), part, 2)) {
      const auto status = write_slice(*writer, model_.half, s.tensor, s.rect);
      ASSERT_TRUE(status) << status.error().to_string();
    }
  }
  ASSERT_TRUE(writer->commit(soon()));
}

TEST_F(WriterSessionTest, NewestIsWhatTheSegmentHoldsNow) {
  auto writer = attach();
  expect_works(*writer, 1);
  EXPECT_EQ(writer->newest(), (VersionId{7, 1}));
  expect_works(*writer, 2);
  EXPECT_EQ(writer->newest(), (VersionId{7, 2}));
}

TEST_F(WriterSessionTest, OneSessionASlotInAProcessThoughTheAgentWasRestarted) {
  auto writer = attach();
  ASSERT_TRUE(writer->begin(version(7, 1), soon()));
  agent_.reset();
  agent_ = std::make_unique<MiniAgent>(dir_.path());
  const auto second = Writer::attach(model_.layout, Sidecar{}, writer_options(dir_.path()), soon());
  ASSERT_FALSE(second);
  EXPECT_EQ(second.error().code(), Errc::already_exists);
  EXPECT_THAT(second.error().message(), HasSubstr("writer slot 0"));
  EXPECT_THAT(second.error().message(), HasSubstr("pid " + std::to_string(::getpid())));
  ASSERT_TRUE(write_all(*writer, model_.half));
  ASSERT_TRUE(writer->commit(soon()));
  writer.reset();
  writer = attach();
  ASSERT_TRUE(writer);
  EXPECT_EQ(writer->newest(), (VersionId{7, 1}));
}

}  // namespace
}  // namespace deltasync::test
