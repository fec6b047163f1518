// The names of an agent's files: those that it removes are its own.
#include <filesystem>

#include "shm/side_files.hpp"
#include "tests/agent/agent_harness.hpp"

namespace deltasync::agent {
namespace {

namespace fs = std::filesystem;

class Names : public AgentTest {
 protected:
  bool there(const std::string& name) const { return fs::exists(dir_.path() / name); }
  std::size_t kept_deltas() const { return shm::find_side_files({dir_.path(), "test.g1"}).size(); }
};

TEST_F(Names, AnEndThatIsNotWaitedForRemovesThem) {
  start_agent();
  for (int i = 0; i < 2; ++i) next_version();
  EXPECT_TRUE(eventually([&] { return kept_deltas() == 1; }));
  Agent::abandon(options_, agent_->core().files().names());
  EXPECT_TRUE(there("test.g1")) << "only where that is asked for";
  options_.remove_segment_on_exit = true;
  Agent::abandon(options_, agent_->core().files().names());
  EXPECT_FALSE(there("test.g1") || there("test.lock"));
  EXPECT_EQ(kept_deltas(), 0u);
}

/// A cleaner took the names away, and another agent of the name has started.
TEST_F(Names, ItLeavesThoseThatAreAnothers) {
  options_.remove_segment_on_exit = true;
  start_agent();
  next_version();
  for (const char* name : {"test.g1", "test.lock"}) fs::remove(dir_.path() / name);
  for (const char* name : {"test.g1", "test.lock", "test.g1.d1", "test.g2"}) dir_.write(name, "another's");
  Agent::abandon(options_, agent_->core().files().names());
  for (const char* name : {"test.g1", "test.lock", "test.g1.d1", "test.g2"}) EXPECT_TRUE(there(name)) << name;
}

/// The process that removed the segment ended before it came to them.
TEST_F(Names, AStartRemovesKeptDeltasWithoutASegment) {
  for (const char* name : {"test.g7.d1", "test.g7.d22", "test.g7.dx", "other.g7.d1"}) dir_.write(name, "left");
  start_agent();
  EXPECT_FALSE(there("test.g7.d1") || there("test.g7.d22"));
  EXPECT_TRUE(there("test.g7.dx") && there("other.g7.d1"));
}

}  // namespace
}  // namespace deltasync::agent
