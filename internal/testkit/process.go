package testkit

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// stat reads the state's letter and the parent of a process from /proc (proc(5), "/proc/pid/stat").
// The name before them, in parentheses, may contain any character.
func stat(pid int) (state byte, parent int, ok bool) {
	b, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	if err != nil {
		return 0, 0, false
	}
	i := bytes.LastIndexByte(b, ')')
	if i < 0 {
		return 0, 0, false
	}
	if _, err := fmt.Sscanf(string(b[i+1:]), " %c %d", &state, &parent); err != nil {
		return 0, 0, false
	}
	return state, parent, true
}

// started returns the start time of a process in ticks since the boot (proc(5), field 22 of
// "/proc/pid/stat"), or "" if it has ended.
func started(pid int) string {
	b, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	if err != nil {
		return ""
	}
	f := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
	if len(f) < 20 || f[0] == "Z" || f[0] == "X" {
		return ""
	}
	return f[19]
}

func processState(pid int) (byte, bool) {
	state, _, ok := stat(pid)
	return state, ok
}

// tree returns pid and its descendants, parents before children. Each child of PostgreSQL is in its
// own process group, so a signal to a group does not reach all of them.
func tree(pid int) ([]int, error) {
	procs, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return nil, err
	}
	children := map[int][]int{}
	for _, p := range procs {
		n, err := strconv.Atoi(filepath.Base(p))
		if err != nil {
			continue
		}
		if _, parent, ok := stat(n); ok {
			children[parent] = append(children[parent], n)
		}
	}
	pids := []int{pid}
	for i := 0; i < len(pids); i++ {
		pids = append(pids, children[pids[i]]...)
	}
	return pids, nil
}
