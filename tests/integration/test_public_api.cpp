// The public headers are enough to train, to serve from memory and to serve from a directory.
#include "tests/agent/agent_harness.hpp"
#include "tests/integration/public_api_example.hpp"

namespace deltasync::agent {
namespace {

TEST_F(AgentTest, PublicHeadersAreEnough) {
  start_agent();
  std::vector<std::byte> bytes;
  for (const Tensor& tensor : model_.layout->tensors()) {
    const auto first = model_.half.begin() + static_cast<std::ptrdiff_t>(tensor.offset);
    bytes.insert(bytes.end(), first, first + static_cast<std::ptrdiff_t>(tensor.bytes));
  }
  const Version version{{epoch_, 1}, "global_step_1"};
  const Status trained = example::train(options_.trainer.socket_path, model_.layout, bytes, version);
  ASSERT_TRUE(trained) << trained.error().to_string();
  const std::string endpoint = "127.0.0.1:" + std::to_string(port());
  const auto memory = example::serve_from_memory(endpoint);
  ASSERT_TRUE(memory) << memory.error().to_string();
  EXPECT_EQ(*memory, bytes);
  const auto report = example::serve_from_directory(endpoint, dir_.path() / "out");
  ASSERT_TRUE(report) << report.error().to_string();
  EXPECT_EQ(report->version, version);
  EXPECT_TRUE(std::filesystem::exists(dir_.path() / "out" / "current" / "model.safetensors"));
}

}  // namespace
}  // namespace deltasync::agent
