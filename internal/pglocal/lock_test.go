package pglocal

import (
	"errors"
	"syscall"
	"testing"
)

func TestADirectoryThatWasLetGoOfIsFreeAlthoughAChildIsJustBeingForked(t *testing.T) {
	dir := t.TempDir()
	lock, err := lockDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	inherited, err := syscall.Dup(int(lock.Fd())) // the descriptor of a child between fork and exec
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := syscall.Close(inherited); err != nil {
			t.Error(err)
		}
	}()
	if _, err := lockDir(dir); !errors.Is(err, ErrInUse) {
		t.Errorf("got %v, want ErrInUse", err)
	}
	for range 2 { // a second unlock does nothing
		if err := unlockDir(lock); err != nil {
			t.Fatal(err)
		}
	}
	again, err := lockDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := unlockDir(again); err != nil {
		t.Error(err)
	}
}
