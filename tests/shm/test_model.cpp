// The protocol as it is: every interleaving of each configuration, and nothing goes wrong.
#include "shm/expect_clean.hpp"

namespace deltasync::shm::model {
namespace {

TEST(Model, OneWriter) {
  expect_clean(one_writer());
}
TEST(Model, OneWriterStopped) {
  expect_clean(one_writer_stopped());
}
TEST(Model, LocalReader) {
  expect_clean(local_reader());
}
TEST(Model, LocalReaderStopped) {
  expect_clean(local_reader_stopped());
}
TEST(Model, TrainerRestart) {
  expect_clean(trainer_restart());
}
TEST(Model, BothRestart) {
  expect_clean(both_restart());
}
TEST(Model, RepeatedNumbers) {
  expect_clean(repeated_numbers());
}
TEST(Model, OlderEpoch) {
  expect_clean(older_epoch());
}
TEST(Model, TwoWriters) {
  expect_clean(two_writers());
}
TEST(Model, TwoWritersAbort) {
  expect_clean(two_writers_abort());
}
TEST(Model, TwoWritersLate) {
  expect_clean(two_writers_late());
}
TEST(Model, TwoWritersStopped) {
  expect_clean(two_writers_stopped());
}
TEST(Model, ReplacedWriter) {
  expect_clean(replaced_writer());
}
TEST(Model, OneWriterExec) {
  expect_clean(one_writer_exec());
}
TEST(Model, TwoWritersExec) {
  expect_clean(two_writers_exec());
}
TEST(Model, ReadsWhileWritten) {
  expect_clean(reads_while_written());
}
TEST(Model, ReadsWhileTwoWrite) {
  expect_clean(reads_while_two_write());
}

}  // namespace
}  // namespace deltasync::shm::model
