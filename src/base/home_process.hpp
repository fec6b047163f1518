// After fork() the child has copies of the parent's objects, but neither their threads nor mappings that are not
// inherited; and what they say over a socket is said in the parent's name. An object with such things remembers where
// it was made, and its destructor does nothing of the kind anywhere else.
#pragma once

#include <unistd.h>

namespace deltasync {

class HomeProcess {
 public:
  bool here() const noexcept { return pid_ == ::getpid(); }
  pid_t pid() const noexcept { return pid_; }

 private:
  pid_t pid_ = ::getpid();
};

}  // namespace deltasync
