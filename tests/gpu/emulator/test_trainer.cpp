// What a trainer on an emulated device sees of deltasync: its graphs' captures go on.
#include <gmock/gmock-matchers.h>

#include "tests/gpu/emulator/capture.hpp"
#include "tests/shm/support.hpp"
#include "tests/writer/harness.hpp"

namespace deltasync::emulator {
namespace {

using namespace deltasync::test;

TEST(EmulatedTrainer, OffloadsAreRefusedWhileAGraphIsCaptured) {
  shm::testing::TempDir dir;
  TestModel model = make_model(41);
  MiniAgent agent(dir.path());
  const cudaStream_t stream = make_stream(cudaStreamNonBlocking);
  std::byte* weights = nullptr;
  ASSERT_EQ(cudaMalloc(reinterpret_cast<void**>(&weights), model.half.size()), cudaSuccess);
  auto writer = Writer::attach(model.layout, Sidecar{}, writer_options(dir.path()), soon());
  ASSERT_TRUE(writer) << writer.error().to_string();
  SliceSource all{{0, {0, 0, model.layout->tensors()[0].rows, model.layout->tensors()[0].cols}}, {}};
  all.source.data = weights;
  all.source.row_stride_bytes = static_cast<std::size_t>(model.layout->tensors()[0].row_bytes());
  all.source.device = {0};
  all.source.stream = stream;
  ASSERT_TRUE((*writer)->begin(version(7, 1), soon()));
  Captured capture(stream);
  const auto refused = (*writer)->write_device({&all, 1}, soon());
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code(), Errc::unsupported);
  EXPECT_THAT(refused.error().message(),
              testing::HasSubstr("cuda:0 (emulated from PTX): a graph is being captured on the stream "
                                 "of the source; offload when that has ended"));
  (*writer)->abort();
  capture.end();
  ASSERT_TRUE((*writer)->begin(version(7, 2), soon()));
  const auto ticket = (*writer)->write_device({&all, 1}, soon());
  ASSERT_TRUE(ticket) << ticket.error().to_string();
  EXPECT_TRUE((*writer)->wait(*ticket, soon()));
  (*writer)->abort();
  writer->reset();
  EXPECT_EQ(cudaFree(weights), cudaSuccess);
  EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
}

}  // namespace
}  // namespace deltasync::emulator
