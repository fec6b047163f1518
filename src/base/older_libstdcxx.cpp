// For portable builds (DELTASYNC_PORTABLE): what g++ 12 has in its library at a version that g++ 11's lacks
// (GLIBCXX_3.4.30). With it programs and the module run beside the libstdc++ of any system with glibc 2.34.
#include <pthread.h>

#include <condition_variable>

// NOLINTNEXTLINE(cert-dcl58-cpp)  the same function, under a name that older libraries have
void std::condition_variable::wait(std::unique_lock<std::mutex>& lock) {
  ::pthread_cond_wait(native_handle(), lock.mutex()->native_handle());
}
