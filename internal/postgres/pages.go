package postgres

import "iter"

// Pages yields up to limit elements, or all with a negative limit. It calls read for each page,
// with the number of elements that the page may have: at most size. read continues behind its last
// page; a page with fewer elements is the last one. An error is the last element.
func Pages[T any](limit, size int, read func(limit int) ([]T, error)) iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		for left, ask := limit, 0; left != 0; left -= ask {
			if ask = size; left > 0 {
				ask = min(left, size)
			}
			page, err := read(ask)
			for _, v := range page {
				if !yield(v, nil) {
					return
				}
			}
			if err != nil {
				var none T
				yield(none, err)
				return
			}
			if len(page) < ask {
				return
			}
		}
	}
}

// Collect returns the elements before the first error, and that error.
func Collect[T any](all iter.Seq2[T, error]) (list []T, err error) {
	for v, err := range all {
		if err != nil {
			return list, err
		}
		list = append(list, v)
	}
	return list, nil
}
