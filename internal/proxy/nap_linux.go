package proxy

import (
	"syscall"
	"time"
)

// nap sleeps for less than a millisecond. A signal may end it early.
func nap(d time.Duration) {
	t := syscall.NsecToTimespec(d.Nanoseconds())
	_ = syscall.Nanosleep(&t, nil)
}
