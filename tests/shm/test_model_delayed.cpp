// The protocol as it is, in a memory where others see a writer's bytes late: at any moment up to its next word.
#include "shm/expect_clean.hpp"

namespace deltasync::shm::model {
namespace {

TEST(ModelDelayed, OneWriter) {
  expect_clean(delayed<one_writer>());
}
TEST(ModelDelayed, OneWriterStopped) {
  expect_clean(delayed<one_writer_stopped>());
}
TEST(ModelDelayed, OneWriterExec) {
  expect_clean(delayed<one_writer_exec>());
}
TEST(ModelDelayed, LocalReader) {
  expect_clean(delayed<local_reader>());
}
TEST(ModelDelayed, LocalReaderStopped) {
  expect_clean(delayed<local_reader_stopped>());
}
TEST(ModelDelayed, TwoWritersAbort) {
  expect_clean(delayed<two_writers_abort>());
}
TEST(ModelDelayed, ReplacedWriter) {
  expect_clean(delayed<replaced_writer>());
}
TEST(ModelDelayed, ReadsWhileWritten) {
  expect_clean(delayed<reads_while_written>());
}
TEST(ModelDelayed, ReadsWhileTwoWrite) {
  expect_clean(delayed<reads_while_two_write>());
}

}  // namespace
}  // namespace deltasync::shm::model
