//go:build !linux

package proxy

import "time"

// nap sleeps for less than a millisecond.
func nap(d time.Duration) { time.Sleep(d) }
